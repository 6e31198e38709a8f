"""Which rows of a prompt's passes are noted, and that no more is attended to for them than must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.methods.call import LayerCall
from longreach.methods.mac import rows
from longreach.methods.mac.rows import last_rows
from longreach.ops import KVView, RotaryAngles, RowRange, Rows, Span, Spans, absolute, relative
from tests.methods.metered import passes_of

SIZE = 6


def call(counts: list[int], before: list[int], ahead: int = 0, known: bool = True) -> LayerCall:
    """Sequences of which `before` tokens were read and `counts` are in this pass."""
    seq = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    pos = torch.cat([torch.arange(b, b + n) for b, n in zip(before, counts, strict=True)])
    total = max(b + n for b, n in zip(before, counts, strict=True))
    filled = torch.tensor([b + n for b, n in zip(before, counts, strict=True)])
    kv = KVView(*torch.zeros(2, len(counts), 1, total, 8), filled)
    runs = (
        tuple(RowRange(n, b, first) for b, (n, first) in enumerate(zip(counts, before, strict=True))) if known else None
    )
    turn = RotaryAngles(pos[:, None].float(), pos[:, None].float())
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
    some = last_rows(given, SIZE)
    assert some is not None
    found = [some.rows.pos[some.rows.seq == b].tolist() for b in range(len(counts))]
    assert found == kept
    assert some.rotary is not None and torch.equal(some.rotary().cos[:, 0], some.rows.pos.float())
    if known:
        assert some.rows.runs == tuple(RowRange(len(k), b, k[0]) for b, k in enumerate(kept))
    some.attend(Spans((Span(absolute(2), relative(-3)),)))
    own = zip(given.rows.seq.tolist(), given.rows.pos.tolist(), strict=True)
    want = [[max(0, pos - 5) if pos in kept[b] else 0] for b, pos in own]
    assert passes_of(given, "key_bytes") == [want], "the whole call's meter knows which rows they were"


@pytest.mark.parametrize("known", [True, False])
def test_rows_that_later_ones_push_out_are_not(known: bool) -> None:
    assert last_rows(call([10], [0], ahead=6, known=known), SIZE) is None
    assert last_rows(call([10], [0], ahead=1000, known=known), SIZE) is None
    assert last_rows(call([0], [5], known=known), SIZE) is None


def test_they_are_found_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    find, given = rows._index, call([10], [0])
    monkeypatch.setattr(rows, "_index", lambda *given: found.append(given[2]) or find(*given))
    for layer in range(3):
        some = last_rows(replace(given, layer=layer), SIZE)
        assert some is not None and some.rows.pos.tolist() == [4, 5, 6, 7, 8, 9]
    assert found == [SIZE]
    other = last_rows(replace(given, layer=3), SIZE - 2)
    assert other is not None and other.rows.pos.tolist() == [6, 7, 8, 9] and found == [SIZE, SIZE - 2]
    moved = Rows(given.rows.q, given.rows.seq, given.rows.pos.clone(), given.rows.runs)
    last_rows(replace(given, rows=moved), SIZE)  # a layer with slots of its own
    assert found == [SIZE, SIZE - 2, SIZE]
