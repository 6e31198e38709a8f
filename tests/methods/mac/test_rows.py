"""Which rows of a prompt's passes are noted, and that no more is attended to for them than must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.methods.call import LayerCall
from longreach.methods.mac.rows import last_rows
from longreach.ops import KVView, Rows, Run, Span, Turn, at, near

SIZE = 6


def call(counts: list[int], before: list[int], ahead: int = 0, known: bool = True) -> LayerCall:
    """Sequences of which `before` tokens were read and `counts` are in this pass."""
    seq = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    pos = torch.cat([torch.arange(b, b + n) for b, n in zip(before, counts, strict=True)])
    total = max(b + n for b, n in zip(before, counts, strict=True))
    filled = torch.tensor([b + n for b, n in zip(before, counts, strict=True)])
    kv = KVView(*torch.zeros(2, len(counts), 1, total, 8), filled)
    runs = tuple(Run(n, b, first) for b, (n, first) in enumerate(zip(counts, before, strict=True))) if known else None
    turn = Turn(pos[:, None].float(), pos[:, None].float())
    return LayerCall(0, Rows(torch.zeros(len(pos), 1, 8), seq, pos, runs), kv, torch.arange(len(counts)), 1.0,
                     rotary=lambda: turn, prompt_tokens_left=ahead)  # fmt: skip


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("counts", "before", "ahead", "kept"),
    [
        ([10], [0], 0, [[4, 5, 6, 7, 8, 9]]),
        ([3], [0], 0, [[0, 1, 2]]),
        ([3], [40], 0, [[40, 41, 42]]),
        ([10, 2, 7], [0, 50, 3], 0, [[4, 5, 6, 7, 8, 9], [50, 51], [4, 5, 6, 7, 8, 9]]),
        ([10, 2], [0, 1], 4, [[8, 9], [1, 2]]),
        ([10, 1], [0, 9], 5, [[9], [9]]),
    ],
)
def test_the_last_rows_are_kept(
    known: bool, counts: list[int], before: list[int], ahead: int, kept: list[list[int]]
) -> None:
    given = call(counts, before, ahead, known)
    kept_rows = last_rows(given, SIZE)
    assert kept_rows is not None
    some = kept_rows.call
    found = [some.rows.pos[some.rows.seq == b].tolist() for b in range(len(counts))]
    assert found == kept
    assert some.turn is not None and torch.equal(some.turn().cos[:, 0], some.rows.pos.float())
    if known:
        assert some.rows.runs == tuple(Run(len(k), b, k[0]) for b, k in enumerate(kept))
    read = kept_rows.among(given.rows, Span(at(2), near(-3))).reads(given.rows, given.kv)[:, 0].tolist()
    rows = zip(given.rows.seq.tolist(), given.rows.pos.tolist(), strict=True)
    assert read == [max(0, pos - 5) if pos in kept[b] else 0 for b, pos in rows]


@pytest.mark.parametrize("known", [True, False])
def test_rows_that_later_ones_push_out_are_not(known: bool) -> None:
    assert last_rows(call([10], [0], prompt_tokens_left=6, known=known), SIZE) is None
    assert last_rows(call([10], [0], prompt_tokens_left=1000, known=known), SIZE) is None
    assert last_rows(call([0], [5], known=known), SIZE) is None


def test_they_are_found_once_a_pass() -> None:
    given = call([10], [0])
    some = last_rows(given, SIZE)
    (found,) = given.shared.values()
    given.shared[next(iter(given.shared))] = (found[0][:2], (Run(2, 0, 4),))
    other = last_rows(replace(given, layer=1), SIZE)
    assert some is not None and other is not None and other.call.rows.pos.tolist() == [4, 5]
