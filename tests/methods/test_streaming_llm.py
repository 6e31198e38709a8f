"""Attention sinks and a window, slot by slot."""

from __future__ import annotations

import math

import pytest
import torch

from longreach.cache import CacheConfig
from longreach.methods.streaming_llm import StreamingLLM
from longreach.testing.tolerance import assert_close
from tests.methods import one_layer
from tests.methods.drive import CACHES, exact, read_text, slots_read, text
from tests.methods.metered import metadata_of
from tests.methods.one_layer import Layers


def kept(method: StreamingLLM, pos: int) -> set[int]:
    """The slots a row at `pos` attends to."""
    context = pos + 1
    window = method.window if isinstance(method.window, int) else max(1, math.ceil(method.window * context - 1e-9))
    return {slot for slot in range(context) if slot < method.sinks or slot > pos - window}


@pytest.mark.parametrize(
    "method",
    [
        StreamingLLM(),
        StreamingLLM(sinks=0, window=1),
        StreamingLLM(sinks=0, window=6),
        StreamingLLM(sinks=3, window=1),
        StreamingLLM(sinks=8, window=4),
        StreamingLLM(sinks=100, window=2),
        StreamingLLM(sinks=1, window=100),
        StreamingLLM(sinks=2, window=0.5),
        StreamingLLM(sinks=4, window=1.0),
        StreamingLLM(sinks=0, window=1e-9),
    ],
)
def test_every_row_reads_its_sinks_and_its_window(method: StreamingLLM) -> None:
    """Short contexts, where they overlap, included: what lies in both is read once."""
    for turn in read_text(method, text(33), chunks=[11, 19]):
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            (selection,), (values,) = call.meter.keys, call.meter.values
            assert selection is values and metadata_of(call) == ([0] * len(call.rows.pos), 0)
            read = slots_read(call, [selection])
            for row, pos in enumerate(call.rows.pos.tolist()):
                want = kept(method, pos)
                for head in range(call.kv.heads):
                    assert set(read[row, head].nonzero()[:, 0].tolist()) == want
                assert selection.keys_read(call.rows, call.kv)[row].tolist() == [len(want)] * call.kv.heads
            assert_close(outcome.partial, exact(call, selection))


def test_a_fraction_grows_with_the_context_and_a_count_does_not() -> None:
    sizes = {}
    for window in (0.25, 5):
        last = read_text(StreamingLLM(sinks=0, window=window), text(41), steps=40)[1:]
        sizes[window] = [int(t.calls[0].meter.keys[0].keys_read(t.calls[0].rows, t.calls[0].kv)[0, 0]) for t in last]
    assert sizes[0.25] == [math.ceil(n / 4) for n in range(2, 42)]
    assert sizes[5] == [min(n, 5) for n in range(2, 42)]


def test_keys_keep_their_true_positions() -> None:
    """Where sinks and window leave nothing out, it is dense attention: positions are not numbered anew."""
    for turn in read_text(StreamingLLM(sinks=4, window=8), text(12)):
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            assert_close(outcome.partial, exact(call))
    assert torch.equal(turn.calls[0].rows.pos, torch.tensor([11]))


@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("window", [5, 0.3])
def test_after_eviction_sinks_and_window_are_of_the_kept_keys(window: int | float, config: CacheConfig) -> None:
    """Other keys in each head; a fraction is of those that are left."""
    method = StreamingLLM(sinks=3, window=window)
    layers = Layers(method, config=config)
    layers.read([0, 2], [41, 30])
    layers.keep(0, 0, 18)
    layers.keep(0, 2, 7)
    layers.read([1], [20])
    for step in range(5):
        ((call, outcome),) = layers.decode([2, 1, 0])
        assert call.evicted and call.rows.pos.tolist() == [7 + step, 20 + step, 18 + step]
        ((selection,), (values,)) = call.meter.keys, call.meter.values
        assert selection is values
        read = slots_read(call, [selection])
        for row, pos in enumerate(call.rows.pos.tolist()):
            assert all(set(heads.nonzero()[:, 0].tolist()) == kept(method, pos) for heads in read[row])
        assert_close(outcome.partial, one_layer.exact(call))
