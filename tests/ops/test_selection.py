"""Selections: what they name, what they count as read, what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from longreach.errors import InvalidInput, SelectionError
from longreach.ops import Bound, KVView, Lists, PackedLists, Rows, Selection, Span, Spans, absolute, relative
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import seen_keys
from longreach.testing.selections import packed, random_lists
from tests.ops.cases import Case, cases

few = settings(max_examples=80, deadline=None)


def named(selection: Selection, rows: Rows, kv: KVView) -> torch.Tensor:
    """The oracle's mask: bool [R, H, N]."""
    mask = torch.zeros(*rows.q.shape[:2], kv.capacity, dtype=torch.bool)
    for r, row in enumerate(seen_keys(rows, kv, selection)):
        for h, keys in enumerate(row):
            mask[r, h, list(keys)] = True
    return mask


def over_heads(mask: torch.Tensor, selection: Selection, rows: Rows, kv: KVView) -> torch.Tensor:
    """A mask with any head axis, for each query head."""
    if mask.shape[1] > 1 and selection.per == "kv":
        mask = mask.repeat_interleave(kv.group(rows), 1)
    return mask.expand(rows.q.shape[0], rows.q.shape[1], -1)


@few
@given(cases)
def test_mask_is_what_the_oracle_spells_out(case: Case) -> None:
    rows, kv, selection = case.rows, case.kv, case.selection
    selection.check(rows, kv)
    want = named(selection, rows, kv)
    got = selection.mask(rows, kv)
    assert torch.equal(over_heads(got, selection, rows, kv), want)
    streamed = want.unflatten(1, (kv.heads, kv.group(rows))).any(2)
    assert torch.equal(selection.streamed(rows, kv), streamed)
    some = torch.arange(rows.q.shape[0]).flip(0)[::2]
    taken = selection.take(some)
    assert torch.equal(over_heads(taken.mask(rows.take(some), kv), selection, rows.take(some), kv), want[some])


@few
@given(cases)
def test_reads_counts_what_is_streamed(case: Case) -> None:
    rows, kv, selection = case.rows, case.kv, case.selection
    reads = selection.keys_read(rows, kv)
    assert reads.dtype == torch.int64
    want = named(selection, rows, kv).unflatten(1, (kv.heads, kv.group(rows))).any(2).sum(-1)
    assert torch.equal(reads, want)


@pytest.fixture
def problem() -> tuple[Rows, KVView]:
    kv = random_kv([7, 10], heads=2, dim=8)
    q = torch.zeros(3, 4, 8)
    return Rows(q, torch.tensor([1, 0, 1]), torch.tensor([9, 3, 4])), kv


def slots(selection: Selection, problem: tuple[Rows, KVView], row: int = 0, head: int = 0) -> list[int]:
    mask = selection.mask(*problem)
    return mask.expand(3, -1, -1)[row, head].nonzero()[:, 0].tolist()


def test_spans_by_hand(problem: tuple[Rows, KVView]) -> None:
    assert slots(Spans.dense(), problem) == list(range(10))
    assert slots(Spans.dense(), problem, row=1) == [0, 1, 2, 3]
    assert slots(Spans.window(3), problem) == [7, 8, 9]
    assert slots(Spans.window(3), problem, row=2) == [2, 3, 4]
    assert slots(Spans((Span(absolute(2), absolute(5)),)), problem) == [2, 3, 4]
    assert slots(Spans((Span(absolute(2), relative(-3)),)), problem) == [2, 3, 4, 5]
    assert slots(Spans((Span(relative(-3), absolute(8)),)), problem) == [6, 7]
    assert slots(
        Spans((Span(absolute(0), absolute(2)), Span(absolute(1), absolute(4)), Span(relative(0), relative(1)))), problem
    ) == [0, 1, 2, 3, 9]
    assert slots(Spans((Span(absolute(5), absolute(2)),)), problem) == []
    assert slots(Spans(()), problem) == []
    assert slots(Spans((Span(absolute(4), absolute(1000)),)), problem, row=2) == [4]


def test_relative_bounds_survive_int32_positions(problem: tuple[Rows, KVView]) -> None:
    rows, kv = problem
    small = Rows(rows.q, rows.seq.int(), rows.pos.int())
    far = Spans((Span(relative(-(2**40)), relative(2**40)),))
    assert torch.equal(far.mask(small, kv), Spans.dense().mask(rows, kv))


def test_relative_bounds_name_positions_where_slots_have_them() -> None:
    slot_pos = torch.tensor([[[9, 2, 5, 7], [0, 1, 2, 9]]])
    k = torch.zeros(1, 2, 4, 8)
    kv = KVView(k, k, torch.tensor([4]), slot_pos=slot_pos)
    rows = Rows(torch.zeros(1, 2, 8), torch.tensor([0]), torch.tensor([7]))
    window = Spans.window(3).mask(rows, kv)[0]
    assert [m.nonzero()[:, 0].tolist() for m in window] == [[2, 3], []]
    first = Spans((Span(absolute(0), absolute(2)),)).mask(rows, kv)[0]
    assert [m.nonzero()[:, 0].tolist() for m in first] == [[1], [0, 1]]


def lists(index: object, count: object, **more: object) -> Lists:
    return Lists(torch.tensor(index), torch.tensor(count), **more)  # type: ignore[arg-type]


def test_lists_by_hand(problem: tuple[Rows, KVView]) -> None:
    keys = lists([[[8, 0, -1]], [[3, 5, 1]], [[99, 99, 99]]], [[2], [3], [0]])
    assert slots(keys, problem) == [0, 8]
    assert slots(keys, problem, row=1) == [1, 3]  # slot 5 is filled, but not yet seen
    assert slots(keys, problem, row=2) == []
    blocks = lists([[[2, 0, -1]], [[1, 5, 1]], [[0, 2, 99]]], [[2], [1], [2]], block=4)
    assert slots(blocks, problem) == [0, 1, 2, 3, 8, 9]
    assert slots(blocks, problem, row=1) == []
    assert slots(blocks, problem, row=2) == [0, 1, 2, 3]


def test_overflow_reads_densely_and_shows(problem: tuple[Rows, KVView]) -> None:
    weight = torch.ones(3, 1, 2)
    keys = lists([[[1, 1]], [[0, 1]], [[-5, 999]]], [[3], [2], [7]], log_weight=weight)
    keys.check(*problem)
    assert keys.overflowed[:, 0].tolist() == [True, False, True]
    assert slots(keys, problem) == list(range(10))
    assert slots(keys, problem, row=1) == [0, 1]
    assert slots(keys, problem, row=2) == list(range(5))
    _, weights = keys.chosen(*problem, 10)
    assert weights is not None
    assert weights.abs().sum((1, 2)).tolist() == [0, 2, 0]
    assert keys.keys_read(*problem).tolist() == [[10, 10], [2, 2], [5, 5]]


def test_packed_lists_are_lists(problem: tuple[Rows, KVView]) -> None:
    rows, kv = problem
    for seed in range(20):
        flat = random_lists(rows, kv, per="query", block=1 + seed % 3, weighted=True, shared=seed % 2 == 0, seed=seed)
        both = flat.chosen(rows, kv, 10), packed(flat).chosen(rows, kv, 10)
        for a, b in zip(*both, strict=True):
            assert a is not None and b is not None
            assert torch.equal(a, b)
        assert torch.equal(flat.keys_read(rows, kv), packed(flat).keys_read(rows, kv))


def test_packed_lists_may_all_be_empty(problem: tuple[Rows, KVView]) -> None:
    none = PackedLists(torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    none.check(*problem)
    assert not none.mask(*problem).any()
    assert none.keys_read(*problem).tolist() == [[0, 0]] * 3


def test_a_list_of_a_list_of_is_a_list_of(problem: tuple[Rows, KVView]) -> None:
    two = lists([[[1]], [[2]]], [[1], [1]], row_to_list=torch.tensor([1, 0, 1]))
    assert slots(two, problem) == [2]
    assert two.take(torch.tensor([2, 1])).row_to_list.tolist() == [1, 0]  # type: ignore[union-attr]


def test_heads_use_the_lists_they_are_mapped_to(problem: tuple[Rows, KVView]) -> None:
    """Three lists a row for two KV heads: one may serve both, one nobody."""
    index, count = torch.tensor([[[1, 2], [4, 0], [6, 5]]] * 3), torch.tensor([[2, 1, 2]] * 3)
    crossed = Lists(index, count, head_map=torch.tensor([2, 0]))
    crossed.check(*problem)
    assert (slots(crossed, problem), slots(crossed, problem, head=1)) == ([5, 6], [1, 2])
    assert crossed.keys_read(*problem).tolist() == [[2, 2], [0, 2], [0, 2]]  # rows at 3 and 4 do not see 5 and 6
    both = Lists(index, count, head_map=torch.tensor([1, 1], dtype=torch.int32))
    assert slots(both, problem) == slots(both, problem, head=1) == [4]
    assert slots(both.take(torch.tensor([0, 0, 0])), problem, row=2, head=1) == [4]
    assert both.overflowed.shape == (3, 3)


def test_lists_in_sight_are_counted_without_a_look_at_them(problem: tuple[Rows, KVView]) -> None:
    """What is counted is what is streamed; past the offsets and counts nothing is known of the entries."""
    index, count = torch.tensor([[[1, 2], [0, -9]], [[3, 0], [-9, -9]], [[2, -9], [1, 4]]]), [[2, 1], [2, 0], [1, 2]]
    for more in ({}, {"head_map": torch.tensor([1, 1])}, {"row_to_list": torch.tensor([2, 0, 2])}):
        some = Lists(index, torch.tensor(count), all_visible=True, **more)  # type: ignore[arg-type]
        for same in (some, packed(some)):
            same.check(*problem)
            assert same.all_visible and torch.equal(same.keys_read(*problem), same.streamed(*problem).sum(-1))
            assert same.keys_read(*problem).dtype == torch.int64
    unknown = Lists(torch.full_like(index, -9), torch.tensor(count), all_visible=True)
    assert unknown.keys_read(*problem).tolist() == count
    over = replace(some, count=torch.tensor([[3, 1], [9, 0], [1, 2]]), row_to_list=None)
    assert over.keys_read(*problem).tolist() == [[10, 1], [4, 0], [1, 2]]
    assert Lists(index[:, :1], torch.tensor([[2], [2], [1]]), all_visible=True).keys_read(*problem).tolist() == [
        [2, 2], [2, 2], [1, 1]
    ]  # fmt: skip


RANGE = [
    (lists([[[10]], [[0]], [[0]]], [[1], [1], [1]]), "entry 10 .* outside the 10 slots that sequence 1 holds"),
    (lists([[[0]], [[7]], [[0]]], [[1], [1], [1]]), "entry 7 .* outside the 7 slots that sequence 0 .*position 3"),
    (lists([[[-1]], [[0]], [[0]]], [[1], [1], [1]]), "entry -1"),
    (lists([[[0]], [[2]], [[0]]], [[1], [1], [1]], block=4), "entry 2 .* 2 blocks of 4 slots"),
    (lists([[[0, 3, 3]]], [[3]], row_to_list=torch.tensor([0, 0, 0])), "position .* names an entry twice.*distinct"),
    (lists([[[3, 3], [0, 1], [0, 0], [1, 0]]] * 3, [[2, 2, 1, 2]] * 3, per="query"), "twice"),
    (lists([[[0], [10], [0]]] * 3, [[1, 1, 1]] * 3, head_map=torch.tensor([2, 1])), "entry 10"),
]


@pytest.mark.parametrize(("selection", "message"), RANGE)
def test_entries_out_of_range_or_twice_are_refused(
    problem: tuple[Rows, KVView], selection: Lists, message: str
) -> None:
    for refuse in (selection.check, selection.mask):
        with pytest.raises(SelectionError, match=message):
            refuse(*problem)


def test_entries_past_the_count_are_not_looked_at(problem: tuple[Rows, KVView]) -> None:
    assert slots(lists([[[4, 4, -3]]], [[1]], row_to_list=torch.zeros(3, dtype=torch.int64)), problem) == [4]


INDEX = torch.zeros(3, 1, 2, dtype=torch.int64)
COUNT = torch.ones(3, 1, dtype=torch.int64)
FLAT = torch.zeros(3, dtype=torch.int64)
OFFSETS = torch.arange(4)
META = torch.device("meta")
REFUSED = [
    (Spans((Span(absolute(-1), absolute(3)),)), "absolute bounds must be >= 0, got -1"),
    (Spans((Span(absolute(torch.tensor([[0], [-2], [0]])), absolute(3)),)), "absolute bounds must be >= 0, got -2"),
    (Spans((Span(absolute(0), Bound(1.5, False)),)), "expected an int or int \\[R=3, heads\\], got float"),
    # type: ignore[arg-type]
    (Spans((Span(0, 3),)), "made by absolute\\(\\) or relative\\(\\), got int"),  # type: ignore[arg-type]
    (Spans(Span(absolute(0), absolute(3))), "made by absolute\\(\\) or relative\\(\\)"),  # type: ignore[arg-type]
    (Spans((Span(absolute(0), absolute(torch.zeros(3, 1))),)), "got float32\\[3, 1\\]"),
    (Spans((Span(absolute(0), absolute(torch.zeros(3, dtype=torch.int64))),)), "got int64\\[3\\]"),
    (Spans((Span(absolute(0), absolute(torch.zeros(2, 1, dtype=torch.int64))),)), "got int64\\[2, 1\\]"),
    (Spans((Span(absolute(0), absolute(torch.zeros(3, 4, dtype=torch.int64))),)), "expected 1 or 2 kv heads, got 4"),
    (
        Spans((Span(absolute(0), absolute(torch.zeros(3, 2, dtype=torch.int64))),), "query"),
        "expected 1 or 4 query heads, got 2",
    ),
    (
        Spans((Span(absolute(0), absolute(torch.zeros(3, 2, dtype=torch.int64))),), "both"),
        "'kv' or 'query', got 'both'",
    ),  # type: ignore[arg-type]
    (Spans((Span(absolute(0), relative(torch.zeros(3, 1, dtype=torch.int64, device=META))),)), "on meta"),
    (Lists(INDEX.float(), COUNT), "index: expected int \\[L, heads, C\\], got float32"),
    (Lists(INDEX[..., 0], COUNT), "index: .*got int64\\[3, 1\\]"),
    (Lists(INDEX.expand(3, 3, 2), COUNT.expand(3, 3)), "index: expected 1 or 2 kv heads, got 3"),
    (Lists(INDEX, COUNT.float()), "count: expected int \\[3, 1\\], got float32"),
    (Lists(INDEX, COUNT[:, 0]), "count: expected int \\[3, 1\\], got int64\\[3\\]"),
    (Lists(INDEX, COUNT.to(META)), "count: expected on cpu like the rows, got .*meta"),
    (Lists(INDEX, -COUNT), "count: expected >= 0, got -1"),
    (Lists(INDEX, COUNT, INDEX), "log_weight: expected float \\[3, 1, 2\\], got int64"),
    (Lists(INDEX, COUNT, torch.zeros(3, 1)), "log_weight: expected float \\[3, 1, 2\\], got float32\\[3, 1\\]"),
    (Lists(INDEX, COUNT, torch.zeros(3, 1, 2, device=META)), "log_weight: expected on cpu"),
    (Lists(INDEX, COUNT, block=0), "block: expected a count of keys >= 1, got 0"),
    (Lists(INDEX, COUNT, block=2.0), "block: .*got 2.0"),  # type: ignore[arg-type]
    (Lists(INDEX[:2], COUNT[:2]), "lists: expected one per row \\(3\\) or row_to_list, got 2"),
    (Lists(INDEX, COUNT, row_to_list=COUNT), "row_to_list: expected int \\[R=3\\] on cpu, got int64\\[3, 1\\]"),
    (Lists(INDEX, COUNT, row_to_list=[0, 0, 0]), "row_to_list: .* got list"),  # type: ignore[arg-type]
    (Lists(INDEX, COUNT, row_to_list=FLAT.to(META)), "row_to_list: .*on meta"),
    (Lists(INDEX, COUNT, row_to_list=FLAT + 3), "row_to_list: expected values in \\[0, 3\\), got 3 to 3"),
    (Lists(INDEX, COUNT, head_map=FLAT), "head_map: expected int \\[2 kv heads\\] on cpu, got int64\\[3\\]"),
    (Lists(INDEX, COUNT, per="query", head_map=FLAT[:2]), "head_map: expected int \\[4 query heads\\] .*\\[2\\]"),
    (Lists(INDEX, COUNT, head_map=[0, 0]), "head_map: .* got list"),  # type: ignore[arg-type]
    (Lists(INDEX, COUNT, head_map=FLAT[:2].float()), "head_map: .* got float32"),
    (Lists(INDEX, COUNT, head_map=FLAT[:2].to(META)), "head_map: .*on meta"),
    (Lists(INDEX, COUNT, head_map=FLAT[:2] + 1), "head_map: expected values in \\[0, 1\\), got 1 to 1"),
    (Lists(INDEX, COUNT, head_map=FLAT[:2] - 1), "head_map: .* got -1 to -1"),
    (Lists(INDEX[:, :0], COUNT[:, :0], head_map=FLAT[:2]), "index: expected lists of one head or more, got 0"),
    (Lists(INDEX, COUNT, head_map=FLAT[:2], per="both"), "'kv' or 'query', got 'both'"),  # type: ignore[arg-type]
    (Lists(INDEX, COUNT, per="query", all_visible=True), "all_visible: expected lists per KV head"),
    (PackedLists(FLAT, OFFSETS, block=2, all_visible=True), "all_visible: expected lists per KV head"),
    (PackedLists(FLAT, OFFSETS, head_map=FLAT), "head_map: expected int \\[2 kv heads\\]"),
    (PackedLists(FLAT.float(), OFFSETS), "index: expected int, one dimension"),
    (PackedLists(FLAT, OFFSETS.float()), "offsets: expected int, one dimension"),
    (PackedLists(FLAT, OFFSETS.to(META)), "offsets: .*meta"),
    (PackedLists(FLAT, OFFSETS[:3]), "one per row \\(3\\) or row_to_list, got 2"),
    (PackedLists(FLAT, OFFSETS, heads=2), "offsets: expected L \\* 2 \\+ 1 entries"),
    (PackedLists(FLAT, OFFSETS[:0]), "offsets: expected L \\* 1 \\+ 1 entries"),
    (PackedLists(FLAT, OFFSETS, heads=0), "heads: expected 1 or 2 kv heads, got 0"),
    (PackedLists(FLAT, OFFSETS, log_weight=FLAT), "log_weight: expected float \\[3\\], got int64"),
    (PackedLists(FLAT, OFFSETS, log_weight=[0.0]), "log_weight: .* got list"),  # type: ignore[arg-type]
    (PackedLists(FLAT, OFFSETS, block=-1), "block: .* got -1"),
    (PackedLists(FLAT, OFFSETS, row_to_list=FLAT - 1), "row_to_list: expected values in \\[0, 3\\), got -1 to -1"),
]


@pytest.mark.parametrize(("selection", "message"), REFUSED)
def test_what_does_not_fit_the_rows_is_refused(
    problem: tuple[Rows, KVView], selection: Selection, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        selection.check(*problem)


@pytest.mark.parametrize("offsets", [[0, 2, 1, 3], [0, 1, 2, 4], [-1, 1, 2, 3]])
def test_offsets_ascend_within_the_index(problem: tuple[Rows, KVView], offsets: list[int]) -> None:
    bad = PackedLists(torch.tensor([0, 1, 2]), torch.tensor(offsets))
    message = f"ascend within the 3 entries of index, got {offsets[0]} to {offsets[-1]}"
    for refuse in (bad.check, bad.mask):
        with pytest.raises(SelectionError, match=re.escape(message)):
            refuse(*problem)


def test_rows_are_none() -> None:
    kv = random_kv([5])
    rows = random_rows(kv, 0)
    for selection in (Spans.dense(), Spans(()), random_lists(rows, kv), packed(random_lists(rows, kv))):
        selection.check(rows, kv)
        assert selection.mask(rows, kv).shape[0] == 0
        assert selection.keys_read(rows, kv).shape == (0, 2)
