"""sampling_variance on a CPU: its definition, memory that it must not read, and input that it must refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, SelectionError, UnknownName, Unsupported
from longreach.ops import KVView, Lists, PackedLists, Partial, sampling_variance
from longreach.ops.doors import op_named
from longreach.testing.inputs import poison
from tests.ops.variance.cases import IMPLS, Case, brute, case


def held_to(case: Case, impl: str) -> None:
    got, want = sampling_variance(*case.given, **case.logits, impl=impl), brute(case)
    assert got.dtype == case.whole.out.dtype and got.shape == want.shape
    assert (want > 0).any()
    assert torch.equal(got == 0, want == 0)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("per", ["kv", "query"])
@pytest.mark.parametrize("group", [1, 2, 5, 16])
@pytest.mark.parametrize("dim", [8, 72])
@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.covering
def test_definition(
    impl: str, per: Any, group: int, dim: int, page: int | None, dtype: torch.dtype, softcap: float | None
) -> None:
    held_to(case([53, 71], per=per, group=group, dim=dim, page=page, dtype=dtype, softcap=softcap), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_other_lists(impl: str) -> None:
    """Without weights; shared by rows and heads; one for all heads; longer than a chunk; in other layouts."""
    for other in (
        {"weighted": False}, {"shared": True}, {"shared": True, "per": "query"}, {"memory": "packed"},
        {"memory": "tokens", "page": 4, "ints": torch.int32},
    ):  # fmt: skip
        held_to(case([53, 71], **other), impl)  # type: ignore[arg-type]
    held_to(case([700], count=2, room=600), impl)
    one = case([90], count=3, heads=1, group=4)
    held_to(one, impl)
    single = Lists(one.lists.index, one.lists.count, one.lists.log_weight, "query")  # one list serves all query heads
    held_to(one._replace(lists=single), impl)


def test_fp64() -> None:
    double = case([40], dtype=torch.float64)
    torch.testing.assert_close(sampling_variance(*double.given, **double.logits), brute(double), rtol=1e-12, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_threads_share_the_keys(impl: str) -> None:
    long = case([900], count=2, room=800)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        held_to(long, impl)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_attended_to(impl: str) -> None:
    """An output over no keys has no variance; nor has one whose lists are all empty, or all overflowed."""
    some = case([40])
    nothing = Partial.empty(5, 4, 16)
    assert (sampling_variance(*some.given[:4], nothing, **some.logits, impl=impl) == 0).all()
    for count in (0, some.lists.index.shape[2] + 1):
        lists = replace(some.lists, count=torch.full_like(some.lists.count, count))
        got = sampling_variance(some.rows, some.kv, lists, *some.given[3:], **some.logits, impl=impl)
        assert (got == 0).all()
    none = torch.arange(0)
    empty = sampling_variance(
        some.rows.take(none), some.kv, replace(some.lists, index=some.lists.index[:0], count=some.lists.count[:0],
        log_weight=None), some.factor[:0], Partial.empty(0, 4, 16), **some.logits, impl=impl,
    )  # fmt: skip
    assert empty.shape == (0, 4)


@pytest.mark.parametrize("impl", IMPLS)
def test_only_listed_slots_are_read(impl: str) -> None:
    some = case([60], room=9)
    wanted = sampling_variance(*some.given, **some.logits, impl=impl)
    for g in range(2):
        fits = ~some.lists.overflowed[:, g]
        named = [some.lists.index[r, g, : some.lists.count[r, g]].tolist() for r in fits.nonzero()[:, 0].tolist()]
        poison(some.kv, 0, g, set(range(60)) - {slot for slots in named for slot in slots})
    assert torch.equal(sampling_variance(*some.given, **some.logits, impl=impl), wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_stays_in_its_row(impl: str) -> None:
    some = case([60, 70], count=6)
    wanted = sampling_variance(*some.given, **some.logits, impl=impl)
    bad = some.rows.seq == some.rows.seq[0]
    some.kv.v[int(some.rows.seq[0]), :, :60] = torch.nan
    got = sampling_variance(*some.given, **some.logits, impl=impl)
    assert not bad.all() and torch.equal(got[~bad], wanted[~bad]) and got[bad].isnan().any()


@pytest.mark.parametrize("impl", IMPLS)
def test_invisible_keys_are_left_out(impl: str) -> None:
    some = case([60], weighted=False)
    rows = replace(some.rows, pos=torch.full_like(some.rows.pos, 20))
    held_to(some._replace(rows=rows), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("entry", [-1, 60, 10**6])
def test_other_slots_are_refused(impl: str, entry: int) -> None:
    some = case([60])
    some.lists.index[1, 1, 0], some.lists.count[1, 1] = entry, 1
    with pytest.raises(SelectionError, match="60 slots"):
        sampling_variance(*some.given, **some.logits, impl=impl)


def test_what_does_not_fit_is_refused() -> None:
    some = case([30])
    factor, whole, index = some.factor, some.whole, some.lists.index
    packed = PackedLists(torch.zeros(0, dtype=torch.int64), torch.zeros(11, dtype=torch.int64), 2)
    for number, wrong, message in (
        (0, None, "rows: expected Rows, got NoneType"),
        (1, None, "kv: expected a KVView, got NoneType"),
        (2, packed, "lists: expected Lists, got PackedLists"),
        (2, replace(some.lists, block=2), "lists: expected entries of single keys, got blocks of 2"),
        (2, replace(some.lists, index=index[:3]), "count: expected int"),
        (3, factor.double(), r"factor: expected float32 \[5, 2, 30\] on cpu like index, got float64"),
        (3, factor[..., :9], "factor: expected float32"),
        (3, factor.to("meta"), "factor: .* on meta"),
        (4, None, "whole: expected a Partial, got NoneType"),
        (4, Partial.empty(5, 2, 16), r"whole: expected out \[R, H, D\] = \[5, 4, 16\]"),
    ):
        given: list[Any] = list(some.given)
        given[number] = wrong
        with pytest.raises(InvalidInput, match=message):
            sampling_variance(*given, **some.logits)
    kv = KVView(some.kv.k, some.kv.v, some.kv.seq_lens, slot_pos=torch.zeros(some.kv.k.shape[:3], dtype=torch.int64))
    with pytest.raises(InvalidInput, match="got slot_pos"):
        sampling_variance(some.rows, kv, some.lists, factor, whole, **some.logits)
    with pytest.raises(InvalidInput, match="scale"):
        sampling_variance(*some.given, scale=float("nan"))
    with pytest.raises(InvalidInput, match="softcap"):
        sampling_variance(*some.given, scale=1.0, softcap=0.0)
    with pytest.raises(UnknownName, match="impl of sampling_variance"):
        sampling_variance(*some.given, **some.logits, impl="cuda")
    double = case([30], dtype=torch.float64)
    for impl in ("numba", "triton"):
        with pytest.raises(Unsupported, match="reference"):
            sampling_variance(*double.given, **double.logits, impl=impl)


@pytest.mark.parametrize("per", ["kv", "query"])
def test_what_is_read(per: Any) -> None:
    """Keys and values of all lists in use, an index, a weight and a factor an entry."""
    some = case([60], per=per, room=9)
    op = op_named("sampling_variance")
    keys, factors = op.reads(some.rows, some.kv, None, *some.given[2:])
    used = some.lists.count.masked_fill(some.lists.overflowed, 0).long()
    assert torch.equal(factors.other, 4 * used.sum(1))
    streams = [
        [
            len({
                slot for h in (range(2 * g, 2 * g + 2) if per == "query" else [g])
                for slot in some.lists.index[r, h, : used[r, h]].tolist()
            })
            for g in range(2)
        ]
        for r in range(5)
    ]  # fmt: skip
    assert keys.selection is not None and keys.key_bytes == keys.value_bytes == 16 * 4
    assert keys.selection.keys_read(some.rows, some.kv).tolist() == streams
    assert not keys.selection.overflowed.any()
