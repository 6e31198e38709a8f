"""Weights of some rows against a softmax in fp64, key by key."""

from __future__ import annotations

import math

import pytest
import torch

from longreach.errors import Unsupported
from longreach.evals.attention.weights import blocks, weights, window_of
from longreach.methods.call import LayerCall
from longreach.ops import KVView, Lists, Rows, Selection, Spans
from longreach.ops.doors import Read

KEYS, PAGE, HEADS, GROUPS, DIM = 37, 8, 6, 2, 8
SCALE, CAP = 0.5, 3.0


def call(softcap: float | None, sinks: bool, dtype: torch.dtype = torch.float32) -> LayerCall:
    """One sequence of KEYS keys in pages out of order, of which the last 11 are the rows."""
    pages = -(-KEYS // PAGE)
    k = torch.randn(pages + 2, GROUPS, PAGE, DIM, dtype=dtype)
    table = torch.randperm(pages + 2)[None, :pages]
    kv = KVView(k, torch.randn_like(k), torch.tensor([KEYS]), table)
    rows = Rows(2 * torch.randn(11, HEADS, DIM, dtype=dtype), torch.zeros(11, dtype=torch.int64),
                torch.arange(KEYS - 11, KEYS))  # fmt: skip
    sink = torch.randn(HEADS) if sinks else None
    return LayerCall(0, rows, kv, torch.tensor([0]), SCALE, softcap=softcap, sink_logit=sink)


def reading(call: LayerCall, selection: Selection) -> LayerCall:
    """The call, once it has read the keys and values of a selection, and nothing else."""
    fresh = call.observer()
    fresh.count_read(Read.of(call.kv, selection))
    return fresh


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, CAP])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_softmax(softcap: float | None, sinks: bool, window: int | None, dtype: torch.dtype) -> None:
    made = reading(call(softcap, sinks, dtype), Spans.dense() if window is None else Spans.window(window))
    assert window_of(made) == window
    index, table = torch.tensor([0, 3, 10]), made.kv.block_table
    assert table is not None
    for head in range(GROUPS):
        found = weights(made, index, head, KEYS)
        assert found.share.shape == (3, 3, KEYS) and found.share.dtype == torch.float32
        for r, row in enumerate(index.tolist()):
            pos = int(made.rows.pos[row])
            for g in range(3):
                h = 3 * head + g
                logits = []
                for key in range(KEYS):
                    k = made.kv.k[table[0, key // PAGE], head, key % PAGE].double()
                    x = SCALE * float(made.rows.q[row, h].double() @ k)
                    x = x if softcap is None else softcap * math.tanh(x / softcap)
                    hidden = key > pos or (window is not None and key <= pos - window)
                    logits.append(0.0 if hidden else math.exp(x))
                total = sum(logits)
                assert found.share[r, g].tolist() == pytest.approx([x / total for x in logits], abs=2e-6)
                sink = 0.0 if made.sink_logit is None else math.exp(float(made.sink_logit[h]))
                assert float(found.sink[r, g]) == pytest.approx(sink / (sink + total), abs=1e-6)


def test_blocks_hold_every_row_once_and_no_more_than_fits() -> None:
    index = torch.arange(7)
    assert [b.tolist() for b in blocks(index, 4, 10, most=85)] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [len(b) for b in blocks(index, 4, 1000, most=85)] == [1] * 7
    assert [len(b) for b in blocks(index, 4, 10)] == [7]


def test_a_selection_that_is_no_window_is_refused() -> None:
    lists = Lists(torch.zeros(1, 1, 2, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64))
    with pytest.raises(Unsupported, match="Lists"):
        window_of(reading(call(None, False), lists))
