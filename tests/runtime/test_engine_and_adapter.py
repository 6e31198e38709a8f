"""An engine that gets a model's queries, keys and values computes what the transformers adapter computed from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach import MAC, Kascade, Quest, StreamingLLM, attach
from longreach.adapters.transformers import shape_of
from longreach.methods.base import AttentionMethod
from longreach.methods.dense import Dense
from longreach.testing.tiny import random_tokens
from tests.methods.drive import LAYERS, Text
from tests.methods.planned import tiny
from tests.runtime.toy_engine import Request, ToyEngine, outputs, prefill_for

METHODS = [
    Dense(),
    StreamingLLM(sinks=2, window=9),
    Quest(k=12, page=4, dense_layers=()),
    Kascade(k=7, min_keys=4),
    MAC(window=20, band=4, tau=0.4, min_context=0),
]
PROMPTS, STEPS = (48, 16, 32), 6


def answered(model: Any, method: AttentionMethod, length: int) -> tuple[Text, Tensor, Any]:
    """A prompt's and its answer's queries, keys and values, results [L, N, H, D] of their attention, and the report."""
    seen: list[list[tuple[Tensor, ...]]] = [[] for _ in range(LAYERS)]

    def keep(phase: Any, call: Any, outcome: Any) -> None:
        page, offset = call.kv.locate(call.rows.seq, call.rows.pos)
        rows = call.rows.q, call.kv.k[page, :, offset], call.kv.v[page, :, offset], outcome.partial.out
        seen[call.layer].append(tuple(x.clone() for x in rows))

    with attach(model, prefill=prefill_for(method), decode=method) as session:
        session.on_layer = keep
        model.generate(random_tokens(1, length, seed=length), max_new_tokens=STEPS + 1, do_sample=False)
        report = session.report()
    q, k, v, out = (torch.stack([torch.cat(x) for x in parts]) for parts in zip(*(zip(*s) for s in seen)))
    return Text(q, k, v), out, report


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_an_engine_gets_the_results_of_the_adapter(method: AttentionMethod) -> None:
    """Each prompt was answered alone; the engine takes them in chunks, beside each other's answers."""
    model = tiny()
    found = [answered(model, method, length) for length in PROMPTS]
    texts = [whole for whole, _, _ in found]
    assert [t.q.shape[1] for t in texts] == [n + STEPS for n in PROMPTS]
    first, second, third = (Request(t, n, slot) for t, n, slot in zip(texts, PROMPTS, (2, 0, 1), strict=True))
    engine = ToyEngine(prefill_for(method), method, slots=3, pages=20, model=shape_of(model), logits=({},) * LAYERS)
    engine.step([(first, 24), (second, 8)])
    engine.step([(second, 8), (first, 24)])
    engine.step([(third, 32), (first, 1), (second, 1)])
    for _ in range(STEPS - 1):
        engine.step([(second, 1), (third, 1), (first, 1)])
    engine.step([(third, 1)])
    for request, (whole, want, _) in zip((first, second, third), found, strict=True):
        torch.testing.assert_close(outputs(request), want, rtol=0, atol=2e-5 * float(whole.v.abs().max()))
    share = found[0][2].fraction("decode")
    assert share == 1.0 if isinstance(method, Dense) else share != 1.0  # or all would be dense attention
