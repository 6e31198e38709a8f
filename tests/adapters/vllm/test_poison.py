"""What a report calls unread is not read: it is NaN while the method runs, and the tokens do not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.cache import PerTokenState
from longreach.methods.call import LayerCall, Meter
from longreach.methods.kascade.state import KascadeState
from longreach.methods.omnikv import OmniKV
from longreach.runtime import Pass, attend_layer
from tests.adapters.vllm.engines import METHODS, answers, engine, expected, prompts

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("decode", [name for name in METHODS if name != "dense"])
def test_unread_memory_may_hold_anything(decode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = 0

    def poisoned(p: Pass, call: LayerCall, **options: Any) -> Any:
        nonlocal hidden
        with nan_where_unread(p, call) as count:
            hidden += count
            return attend_layer(p, call, **options)

    monkeypatch.setattr("longreach.adapters.vllm.impl.attend_layer", poisoned)
    ids = prompts(2000, 300, 900)
    with engine(decode, num_gpu_blocks_override=80, max_model_len=1024) as llm:
        assert answers(llm, ids, 12) == expected(decode, ids, 12)
    assert hidden > 0


@contextmanager
def nan_where_unread(p: Pass, call: LayerCall) -> Iterator[int]:
    """Within this block slots of the whole cache, and kept units, that the method does not read are NaN. Yields how
    many keys are."""
    method = p.segments[0].method
    state = p.states.get(method, call)  # type: ignore[union-attr]
    dry = replace(call, meter=Meter(), shared=dict(call.shared))
    method.run(dry, state)  # state is written twice, with the same numbers
    kept = [(x, x.clone(), read) for x, read in units(call, state)]
    memory = [(x, x.clone(), slots_of(call, selections)) for x, selections in
              ((call.kv.k, dry.meter.keys), (call.kv.v, dry.meter.values))]  # fmt: skip
    for x, _, read in (*memory, *kept):
        x[~read] = torch.nan if x.is_floating_point() else 127
    try:
        yield int((~memory[0][2]).sum())
    finally:
        for x, held, read in (*memory, *kept):
            x[~read] = held[~read]


def slots_of(call: LayerCall, selections: Any) -> Tensor:
    """bool [P, G, page]: slots of the cache that some row reads."""
    found = torch.zeros(call.kv.k.shape[:3], dtype=torch.bool)
    for selection in selections:
        read = selection.streamed(call.rows, call.kv, int(call.kv.seq_lens.max())).expand(-1, call.kv.heads, -1)
        row, head, slot = read.nonzero(as_tuple=True)
        page, offset = call.kv.locate(call.rows.seq[row], slot)
        found[page, head, offset] = True
    return found


def units(call: LayerCall, state: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The kept tensors, and the units of slots in use, bool [P, G, units]. All of these are read or written."""
    held = state.copy if isinstance(state, KascadeState) else state
    if not isinstance(held, PerTokenState):
        return
    tensor = next(iter(held._kept.values()))
    used = torch.zeros(tensor.shape[:3], dtype=torch.bool)
    for seq, length in enumerate(call.kv.seq_lens.tolist()):
        unit = torch.arange(-(-length // held.per))
        page, at = held.locate(call.kv, torch.full_like(unit, seq), unit)
        used[page, :, at] = True
    for x in held._kept.values():
        yield x, used


def test_the_poison_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that the report does not name, and that is read, would show: here of a method that names too little."""
    monkeypatch.setattr(OmniKV, "choosing_layers", lambda self, model: (0, 1, 2))

    def poisoned(p: Pass, call: LayerCall, **options: Any) -> Any:
        with nan_where_unread(p, call):
            call.kv.k[call.kv.block_table[:, 0].long(), :, 0] = torch.nan  # type: ignore[index]
            return attend_layer(p, call, **options)

    monkeypatch.setattr("longreach.adapters.vllm.impl.attend_layer", poisoned)
    ids = prompts(900)
    with engine("omnikv") as llm:
        assert answers(llm, ids, 4) != expected("omnikv", ids, 4)
