"""Selections made for another cache: refused where no device sync is needed, and never followed outside memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, SelectionError
from longreach.ops import KVView, Lists, Rows, Selection, Span, Spans, absolute, attend, attend_with_logits, relative
from longreach.ops.attend import Entries, attend_amend, attend_from_logits, attend_split
from longreach.ops.attend import triton as kernels
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import exact_attend
from longreach.testing.selections import Kind, packed, random_lists
from tests.ops.attend.kernels import PLACE, held_to, here

LENGTHS = (7, 30)
impls = pytest.mark.parametrize("impl", ["reference", "triton"])
kinds = pytest.mark.parametrize("kind", ["spans", "lists", "packed"])


def plain(rows: Rows, kv: KVView, selection: Selection, impl: str) -> Any:
    return attend(rows, kv, selection, scale=0.25, impl=impl)


def in_two(rows: Rows, kv: KVView, selection: Selection, impl: str) -> Any:
    return attend_split(rows, kv, selection, relative(-2), scale=0.25, impl=impl)


def from_logits(rows: Rows, kv: KVView, selection: Selection, impl: str) -> Any:
    _, logits = attend_with_logits(rows, kv, scale=0.25, impl=impl)
    return attend_from_logits(rows, kv, selection, logits, impl=impl)


def amended(rows: Rows, kv: KVView, selection: Selection, impl: str) -> Any:
    count, heads, dim = rows.q.shape
    out = torch.zeros(count * heads, dim, device=PLACE)
    place = torch.full((count, heads), -1, dtype=torch.int32, device=PLACE)
    entries = Entries(out, out.new_full((count * heads,), -torch.inf))
    return attend_amend(rows, kv, selection, relative(-2), entries, place, place, scale=0.25, impl=impl)


ops = pytest.mark.parametrize("op", [plain, in_two, from_logits, amended])
Attend = Callable[[Rows, KVView, Selection, str], Any]


def problem(lengths: tuple[int, ...] = LENGTHS, *, heads: int = 2, **more: Any) -> tuple[Rows, KVView]:
    kv = random_kv(lengths, heads=heads, dim=16, **more)
    rows = Rows(torch.randn(len(lengths), 4, 16), torch.arange(len(lengths)), kv.seq_lens - 1)
    return rows, kv


def made_for(kind: Kind, rows: Rows, kv: KVView) -> Selection:
    """One bound, or one list, for each row and KV head."""
    count, heads = len(rows.pos), kv.heads
    if kind == "spans":
        return Spans((Span(absolute(torch.zeros(count, heads, dtype=torch.int64)), relative(1)),))
    lists = Lists(torch.zeros(count, heads, 1, dtype=torch.int32), torch.ones(count, heads, dtype=torch.int32))
    return lists if kind == "lists" else packed(lists)


@impls
@ops
@kinds
def test_of_other_heads(op: Attend, kind: Kind, impl: str) -> None:
    other = made_for(kind, *problem(heads=4))
    given = [here(x) for x in problem()]
    with pytest.raises(InvalidInput, match="expected 1 or 2 kv heads, got 4"):
        op(*given, here(other), impl)
    if kind != "spans":
        with pytest.raises(InvalidInput, match=r"head_map: expected int \[2 kv heads\] on .*, got int64\[4\]"):
            op(*given, here(replace(other, head_map=torch.arange(4))), impl)


@impls
@ops
@kinds
@pytest.mark.parametrize("lengths", [(7,), (7, 30, 12)])
def test_of_another_batch(op: Attend, kind: Kind, lengths: tuple[int, ...], impl: str) -> None:
    other = made_for(kind, *problem(lengths))
    rows, kv = problem()
    message = r"expected (an int or int \[R=2, heads\]|one per row \(2\) or row_to_list), got"
    with pytest.raises(InvalidInput, match=message):
        op(here(rows), here(kv), here(other), impl)


@impls
@ops
@pytest.mark.skipif(PLACE == "cuda", reason="would be a device sync; see the test of what is read")
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("kind", ["lists", "packed"])
def test_of_longer_sequences(op: Attend, kind: Kind, block: int, impl: str) -> None:
    rows, kv = problem()
    lists = Lists(torch.tensor([[[0, 7, 1]], [[0, 1, 6]]]), torch.tensor([[3], [2]]), block=block)
    made = lists if kind == "lists" else packed(lists)
    with pytest.raises(SelectionError, match=r"entry \d lies outside the \d .* sequence 0 .* made for another cache"):
        op(rows, kv, made, impl)
    shared = replace(made, row_to_list=torch.tensor([1, 0]))
    assert op(rows, kv, shared, impl) is not None  # the longer sequence has them


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("page", [None, 4])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("kind", ["lists", "packed"])
def test_entries_that_are_not_there_read_nothing(
    kind: Kind, page: int | None, block: int, evicted: bool, impl: str
) -> None:
    """In device memory no entry is checked: the kernels skip those that name no slot in use. Unused slots are NaN."""
    kv = random_kv([9, 33, 1], heads=2, dim=16, page=page, evicted=evicted)
    rows = random_rows(kv, 6)
    good = random_lists(rows, kv, block=block, seed=3)
    far = 2**31 // block  # entries are multiplied by `block` in 32 bits
    outside = torch.tensor([far - 1, far // 2, 10**6, 1000, -1, -far, -7, -far // 2])
    index = torch.cat([good.index, torch.zeros(6, 2, 8, dtype=good.index.dtype)], 2)
    for row in range(6):
        for head in range(2):
            used = int(good.count[row, head])
            index[row, head, used : used + 8] = outside[torch.randperm(8)].to(index.dtype)
            order = torch.randperm(used + 8)
            index[row, head, : used + 8] = index[row, head, order]
    bad = Lists(index, good.count + 8, block=block)
    want = exact_attend(rows, kv, good, scale=0.25)
    made: Selection = bad if kind == "lists" else packed(bad)
    if impl == "triton":
        got = kernels.attend(here(rows), here(kv), here(made), scale=0.25, softcap=None, sink_logit=None)
        held_to(got, want, rows.q.dtype)
    else:
        with pytest.raises(SelectionError, match="lies outside"):
            plain(here(rows), here(kv), here(made), impl)


@pytest.mark.parametrize("block", [4, 16])
def test_entries_beyond_32_bits_read_slots_in_use_at_most(block: int) -> None:
    """Which ones is not defined; unused slots are NaN."""
    rows, kv = problem()
    entries = [2**31 - 1, 2**31 // block, 2**30, -(2**31), 3 * 2**30 // block, 1 - 2**30]
    lists = Lists(torch.tensor([[entries]] * 2, dtype=torch.int32), torch.full((2, 1), len(entries)), block=block)
    got = kernels.attend(here(rows), here(kv), here(lists), scale=0.25, softcap=None, sink_logit=None)
    assert bool(got.out.isfinite().all())
