"""An engine with memory of its own drives methods through the runtime, and gets what the library's own cache gives."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import longreach
from longreach import MAC, Kascade, Quest, StreamingLLM
from longreach.errors import Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.dense import Dense
from tests.methods.drive import Text, read_text, text
from tests.methods.drive import outputs as alone_outputs
from tests.runtime.toy_engine import Request, ToyEngine, outputs, prefill_for

METHODS = [
    Dense(),
    StreamingLLM(sinks=2, window=9),
    Quest(k=12, page=4, dense_layers=()),
    Kascade(k=7, min_keys=4),
    Kascade(k=5, min_keys=5, scoring="int8"),
    MAC(window=20, band=4, tau=0.1, min_context=0),
]
STEPS = 6


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_an_engine_gets_the_results_of_the_cache(method: AttentionMethod) -> None:
    """Prompts come in chunks beside decode tokens of others; slots and pages are used again by later requests."""
    tile = 4  # tokens of a tile of the plan for these tests: chunks end at their ends
    prompts = (24, 8, 16, 12)
    requests = [Request(text(n + STEPS, seed=n), n, slot) for n, slot in zip(prompts, (3, 0, 2, 0), strict=True)]
    engine = ToyEngine(prefill_for(method), method, slots=4, pages=12)
    first, short, third, later = requests
    engine.step([(short, 8), (first, 2 * tile)])
    engine.step([(first, 2 * tile), (short, 1), (third, tile)])
    engine.step([(third, 3 * tile), (short, 1), (first, 2 * tile)])
    for _ in range(4):
        engine.step([(short, 1), (first, 1), (third, 1)])
    engine.release(short)  # its slot and pages go to another request
    engine.step([(later, 2 * tile), (third, 1), (first, 1)])
    engine.step([(first, 1), (later, tile), (third, 1)])
    for _ in range(STEPS):
        engine.step([(later, 1)])
    for request in requests:
        chunks = [sizes for sizes in (part.shape[1] for part in request.out) if sizes > 1]
        want = alone_outputs(read_text(method, request.text, chunks=chunks, steps=STEPS))
        torch.testing.assert_close(outputs(request), want, rtol=0, atol=2e-5)
    report = engine.ledger.report(method)
    assert {layer.phase for layer in report.layers} == {"prefill", "decode"}
    assert report.fraction("decode") is not None
    for request in (first, third, later):
        engine.states.check_observed(method, [request.slot], [request.read])


def test_state_by_page_follows_pages_that_are_shared() -> None:
    """A second request takes over the pages of a first one's beginning, which was read once: its bounds lie there."""
    method = Quest(k=8, page=4, dense_layers=())
    whole = text(40, seed=1)
    first = Request(whole, 34, 1)
    engine = ToyEngine(Dense(), method, slots=3, pages=20)
    engine.step([(first, 34)])
    second = Request(whole, 34, 2, pages=first.pages[:4], read=32)  # 4 whole pages of 8 tokens, none read again
    engine.step([(second, 2)])
    for _ in range(6):
        engine.step([(first, 1), (second, 1)])
    torch.testing.assert_close(outputs(second), outputs(first)[:, 32:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("page", [16, 3])
def test_blocks_that_do_not_divide_shared_pages_are_refused(page: int) -> None:
    """They would hold keys of the first request after the shared pages, which the second one has other keys in."""
    method, whole = Quest(k=8, page=page, dense_layers=()), text(40, seed=1)
    engine = ToyEngine(Dense(), method, slots=3, pages=20)
    message = f"quest keeps state for blocks of {page} keys, .* pages of 8 slots.*pages of a multiple of {page}"
    for _ in range(2):  # it is not kept either
        with pytest.raises(Unsupported, match=message):
            engine.step([(Request(whole, 34, 1), 34)])
    engine = ToyEngine(Dense(), method, slots=3, pages=20, shared_pages=False)
    request = Request(whole, 34, 1)
    engine.step([(request, 34)])
    for _ in range(6):
        engine.step([(request, 1)])
    want = alone_outputs(read_text(method, whole, steps=6))
    torch.testing.assert_close(outputs(request), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("page", [1, 2, 8])
def test_sequences_that_differ_after_shared_pages_do_not_disturb_each_other(page: int) -> None:
    method, texts = Quest(k=10, page=page, dense_layers=()), [text(60, seed=1), text(60, seed=5)]
    one, other = ((t.q, t.k, t.v) for t in texts)
    texts[1] = Text(*(torch.cat([x[:, :24], y[:, 24:]], 1) for x, y in zip(one, other, strict=True)))
    engine = ToyEngine(Dense(), method, slots=3, pages=40)
    first = Request(texts[0], 50, 1)
    engine.step([(first, 50)])
    second = Request(texts[1], 50, 2, pages=first.pages[:3], read=24)
    engine.step([(second, 26)])
    for _ in range(6):
        engine.step([(first, 1), (second, 1)])
    for request, start in ((first, 0), (second, 24)):
        alone = Text(*(x[:, :56] for x in (request.text.q, request.text.k, request.text.v)))
        want = alone_outputs(read_text(method, alone, steps=6))[:, start:]
        torch.testing.assert_close(outputs(request), want, rtol=0, atol=2e-5)


def test_the_runtime_needs_no_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from longreach.runtime import Pass, Segment, StateStore, Ledger, attend_layer, drive\n"
        "from longreach.methods.registry import METHODS, method_class\n"
        "[method_class(name) for name in METHODS]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=str(longreach.__path__[0]))
    assert done.returncode == 0, done.stderr
