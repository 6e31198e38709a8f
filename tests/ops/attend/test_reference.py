"""The reference of attend against the fp64 oracle: all that attend promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from longreach.ops import KVView, Lists, Partial, Rows, Selection, Span, Spans, absolute, attend, merge, relative
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.oracle import exact_attend, seen_keys
from longreach.testing.selections import Kind, packed, random_lists, random_selection, random_spans, requiring_grad
from longreach.testing.tolerance import assert_close
from tests.ops.cases import Case, cases

KINDS: tuple[Kind, ...] = ("spans", "lists", "packed")


def check(rows: Rows, kv: KVView, selection: Selection, **logits: Any) -> Partial:
    """attend's result, after comparing it with the oracle's."""
    logits = {"scale": rows.q.shape[2] ** -0.5, **logits}
    got = attend(rows, kv, selection, **logits, impl="reference")
    assert_close(got, exact_attend(rows, kv, selection, **logits))
    return got


@settings(max_examples=150, deadline=None)
@given(cases)
def test_any_case(case: Case) -> None:
    got = check(case.rows, case.kv, case.selection, **case.logits)
    assert got.out.dtype == got.lse.dtype == torch.float32


@pytest.mark.covering
@pytest.mark.parametrize("group", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("per", ["kv", "query"])
@pytest.mark.parametrize("kind", KINDS)
def test_groups(group: int, per: Any, kind: Kind) -> None:
    kv = random_kv([13, 21], heads=2, dim=8, page=4)
    rows = random_rows(kv, 5, group=group)
    for seed in range(3):
        check(rows, kv, random_selection(kind, rows, kv, per=per, seed=seed))


@pytest.mark.covering
@pytest.mark.parametrize("dim", [8, 40, 64, 72, 128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_head_dims_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    kv = random_kv([19], heads=1, dim=dim, dtype=dtype, page=8, memory="packed")
    got = check(random_rows(kv, 4, group=3), kv, Spans.dense())
    assert got.out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.covering
@pytest.mark.parametrize("page", [None, 1, 3, 16, 64])
@pytest.mark.parametrize("memory", ["plain", "packed", "tokens"])
@pytest.mark.parametrize("evicted", [False, True])
def test_memory(page: int | None, memory: Any, evicted: bool) -> None:
    kv = random_kv([70, 0, 33], heads=2, dim=16, page=page, memory=memory, evicted=evicted)
    rows = random_rows(kv, 6)
    check(rows, kv, Spans.dense())
    check(rows, kv, random_spans(rows, kv, seed=1))
    check(rows, kv, random_lists(rows, kv, block=5, weighted=True, seed=2))


@pytest.mark.covering
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("per", ["kv", "query"])
@pytest.mark.parametrize("evicted", [False, True])
def test_head_axis(one: bool, per: Any, evicted: bool) -> None:
    kv = random_kv([23, 9], heads=3, dim=8, evicted=evicted)
    rows = random_rows(kv, 6, group=2)
    for seed in range(4):
        check(rows, kv, random_spans(rows, kv, per=per, one=one, spans=3, seed=seed))
        lists = random_lists(rows, kv, per=per, one=one, weighted=True, shared=seed % 2 == 0, seed=seed)
        check(rows, kv, lists)
        check(rows, kv, packed(lists))


@pytest.mark.parametrize("block", [1, 2, 5, 7, 64])
def test_blocks_need_not_divide_the_context(block: int) -> None:
    kv = random_kv([29, 31], heads=2, dim=8, page=3)
    rows = random_rows(kv, 6)
    held = torch.tensor([-(-29 // block), -(-31 // block)])[rows.seq]
    every = torch.arange(int(held.max())).expand(6, 1, -1)
    got = check(rows, kv, Lists(every, held[:, None], block=block))
    dense = check(rows, kv, Spans.dense())
    assert torch.equal(got.out, dense.out)
    check(rows, kv, Lists(held[:, None, None] - 1, torch.ones(6, 1, dtype=torch.int64), block=block))


def test_overflow_is_dense_and_takes_no_log_weight() -> None:
    kv = random_kv([29], heads=2, dim=8)
    rows = random_rows(kv, 6)
    lists = random_lists(rows, kv, overflow=0.5, weighted=True)
    assert lists.overflowed.any() and not lists.overflowed.all()
    got, dense = check(rows, kv, lists), check(rows, kv, Spans.dense())
    over = lists.overflowed.repeat_interleave(2, 1)
    torch.testing.assert_close(got.out[over], dense.out[over])
    assert not torch.equal(got.out[~over], dense.out[~over])


def test_overlapping_spans_count_a_key_once() -> None:
    kv = random_kv([40], heads=2, dim=8)
    rows = random_rows(kv, 5)
    twice = Spans((Span(absolute(0), relative(1)), Span(relative(-7), relative(1)), Span(absolute(3), absolute(20))))
    assert torch.equal(check(rows, kv, twice).lse, check(rows, kv, Spans.dense()).lse)


def test_log_weights_belong_to_their_entry_and_head() -> None:
    """A weight of log 2 counts a key twice; -inf takes it out."""
    kv = random_kv([6], heads=2, dim=8)
    rows = replace(random_rows(kv, 1), pos=torch.tensor([5]))
    index = torch.tensor([[[4, 1, 3], [0, 5, 2]]])
    count = torch.tensor([[3, 3]])
    weight = torch.tensor([[[1.0, 2.0, 1.0], [0.0, 1.0, 1.0]]]).log()
    got = check(rows, kv, Lists(index, count, weight))
    bare = check(rows, kv, Lists(torch.tensor([[[4, 1, 3], [5, 2, 0]]]), torch.tensor([[3, 2]])))
    again = check(rows, kv, Lists(torch.tensor([[[1], [0]]]), torch.tensor([[1, 0]])))
    torch.testing.assert_close(got.out, merge(bare, again).out)
    torch.testing.assert_close(got.lse, merge(bare, again).lse)


def test_a_weight_of_zero_for_every_key_is_no_key() -> None:
    kv = random_kv([6], heads=1, dim=8, dtype=torch.float64)
    rows = replace(random_rows(kv, 1), pos=torch.tensor([5]))
    q, weight = rows.q.requires_grad_(), torch.full((1, 1, 2), -torch.inf, dtype=torch.float64, requires_grad=True)
    got = check(rows, kv, Lists(torch.tensor([[[1, 2]]]), torch.tensor([[2]]), weight))
    assert bool(got.is_empty.all())
    grads = torch.autograd.grad((got.out.sum(), got.lse.sum()), (q, weight))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_a_sink_is_a_merge(kind: Kind, softcap: float | None) -> None:
    kv = random_kv([19, 0], heads=2, dim=8)
    rows = random_rows(kv, 6)
    selection = random_selection(kind, rows, kv)
    sink = torch.tensor([-2.0, 0.5, 3.0, -torch.inf])
    got = check(rows, kv, selection, softcap=softcap, sink_logit=sink)
    bare = check(rows, kv, selection, softcap=softcap)
    want = merge(bare, Partial(torch.zeros_like(bare.out), sink.expand(6, 4)))
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_a_sink_may_have_any_float_dtype() -> None:
    kv = random_kv([19], heads=2, dim=8)
    rows, sink = random_rows(kv, 3), torch.tensor([-2.0, 0.5, 3.0, 0.25])
    want = check(rows, kv, Spans.dense(), sink_logit=sink)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(check(rows, kv, Spans.dense(), sink_logit=sink.to(dtype)).lse, want.lse)


def test_sinks_alone() -> None:
    kv = random_kv([0], heads=1, dim=8)
    got = check(random_rows(kv, 2, group=2), kv, Spans.dense(), sink_logit=torch.tensor([1.0, -torch.inf]))
    assert got.lse.tolist() == [[1.0, -torch.inf]] * 2
    assert not got.out.any()


SHAPES = [{"scale": 0.0}, {"scale": -1.0}, {"scale": 3.0}, {"softcap": 0.3}, {"softcap": 50.0}]


@pytest.mark.parametrize("logits", SHAPES)
def test_scale_and_softcap(logits: dict[str, float]) -> None:
    kv = random_kv([19, 30], heads=2, dim=16)
    check(random_rows(kv, 6), kv, Spans.dense(), **logits)


def test_large_logits_do_not_overflow() -> None:
    kv = random_kv([30], heads=2, dim=64)
    rows = random_rows(kv, 4)
    got = check(rows, kv, Spans.dense(), scale=1e3)
    assert bool(got.out.isfinite().all() and got.lse.isfinite().all())


NOTHING: list[Selection] = [
    Spans(()),
    Spans((Span(absolute(3), absolute(3)), Span(relative(1), relative(9)))),
    Lists(torch.full((4, 1, 2), -1), torch.zeros(4, 1, dtype=torch.int64)),
    packed(Lists(torch.full((4, 1, 2), -1), torch.zeros(4, 1, dtype=torch.int64))),
]


@pytest.mark.parametrize("selection", NOTHING)
@pytest.mark.parametrize("page", [None, 3])
def test_no_keys(selection: Selection, page: int | None) -> None:
    kv = random_kv([19, 0], heads=2, dim=8, page=page)
    got = check(random_rows(kv, 4), kv, selection)
    assert bool((got.out == 0).all() and (got.lse == -torch.inf).all() and got.is_empty.all())


def test_rows_before_their_sequence_see_nothing() -> None:
    kv = random_kv([5], heads=1, dim=8)
    rows = Rows(torch.randn(2, 1, 8), torch.zeros(2, dtype=torch.int64), torch.tensor([-1, -7]))
    assert bool(check(rows, kv, Spans.dense()).is_empty.all())


@pytest.mark.parametrize("lengths", [[], [0], [4, 9]])
def test_no_rows(lengths: list[int]) -> None:
    kv = random_kv(lengths, heads=2, dim=8, page=3)
    rows = random_rows(kv, 0)
    for kind in KINDS:
        got = check(rows, kv, random_selection(kind, rows, kv), sink_logit=torch.zeros(4))
        assert got.out.shape == (0, 4, 8) and got.lse.shape == (0, 4)


@pytest.mark.parametrize("at_once", [1, 200, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_order_of_rows_and_size_of_steps_do_not_matter(
    at_once: int, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.ops.reference_chunks.SCORES_AT_ONCE", at_once)
    kv = random_kv([19, 0, 30], heads=2, dim=8, page=4)
    rows = random_rows(kv, 12)
    selection = random_selection(kind, rows, kv, seed=3)
    got = check(rows, kv, selection)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    moved = check(rows.take(order), kv, selection.take(order))
    torch.testing.assert_close(moved.out, got.out[order])
    torch.testing.assert_close(moved.lse, got.lse[order])


@settings(max_examples=60, deadline=None)
@given(cases)
def test_what_no_row_selects_is_never_read(case: Case) -> None:
    rows, kv, selection = case.rows, case.kv, case.selection
    before = attend(rows, kv, selection, **case.logits)
    group = kv.group(rows)
    read: set[tuple[int, int, int]] = set()
    for seq, row in zip(rows.seq.tolist(), seen_keys(rows, kv, selection), strict=True):
        read |= {(seq, h // group, slot) for h, keys in enumerate(row) for slot in keys}
    for seq, length in enumerate(kv.seq_lens.tolist()):
        for head in range(kv.heads):
            poison(kv, seq, head, (n for n in range(length) if (seq, head, n) not in read))
    after = attend(rows, kv, selection, **case.logits)
    assert torch.equal(after.out, before.out) and torch.equal(after.lse, before.lse)
    for seq, head, slot in sorted(read)[:1]:
        poison(kv, seq, head, (slot,))
        assert bool(attend(rows, kv, selection, **case.logits).lse.isnan().any())


def test_a_query_head_does_not_read_for_another_kv_head() -> None:
    """Heads choose apart, so a slot that is poison in one KV head may be chosen in another."""
    kv = random_kv([12], heads=2, dim=8)
    rows = replace(random_rows(kv, 2), pos=torch.tensor([11, 11]))
    starts = torch.tensor([[0, 0, 6, 6]] * 2)
    halves = Spans((Span(absolute(starts), absolute(starts + 6)),), per="query")
    poison(kv, 0, 0, range(6, 12))
    poison(kv, 0, 1, range(6))
    check(rows, kv, halves)


def test_parts_merge_to_the_whole() -> None:
    kv = random_kv([31], heads=2, dim=16)
    rows = random_rows(kv, 5)
    cut = [Spans((Span(absolute(a), absolute(b)),)) for a, b in ((0, 4), (4, 17), (17, 99))]
    whole = merge(*(check(rows, kv, part) for part in cut))
    assert_close(whole, exact_attend(rows, kv, Spans.dense(), scale=0.25))


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@pytest.mark.covering
@pytest.mark.parametrize("page", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per", ["kv", "query"])
@pytest.mark.parametrize("shape", ["plain", "capped and sunk"])
def test_gradients(page: int | None, kind: Kind, per: Any, shape: str) -> None:
    """Through out and lse with respect to q, k, v, the sink and the log-weights; some rows see nothing."""
    kv = random_kv([5, 0, 7], heads=2, dim=8, page=page, dtype=torch.float64)
    rows = random_rows(kv, 6, seed=1)
    if kind == "spans":
        selection: Selection = random_spans(rows, kv, per=per, seed=1)
        weight = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    else:
        overflow = 0.1 if kind == "lists" else 0.0
        lists = requiring_grad(random_lists(rows, kv, per=per, block=2, weighted=True, overflow=overflow, seed=2))
        selection = packed(lists) if kind == "packed" else lists
        weight = leaf(selection.log_weight)
    sink = torch.randn(4, dtype=torch.float64)
    logits: dict[str, Any] = {"scale": 0.4, "softcap": 1.2 if shape != "plain" else None}

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        chosen = selection if isinstance(selection, Spans) else replace(selection, log_weight=weight)
        sunk = sink if shape != "plain" else None
        got = attend(replace(rows, q=q), replace(kv, k=k, v=v), chosen, **logits, sink_logit=sunk)
        return got.out, got.lse.masked_fill(got.is_empty, 0.0)

    leaves = [leaf(x) for x in (rows.q, kv.k, kv.v, sink, weight)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    grads = torch.autograd.grad([x.sum() for x in run(*leaves)], leaves, allow_unused=True)
    assert all(g is None or bool(g.isfinite().all()) for g in grads)
    assert all(bool(g.any()) for g in grads[:3])


def test_gradients_where_no_row_sees_a_key() -> None:
    kv = random_kv([5, 0], heads=2, dim=8, dtype=torch.float64)
    rows = random_rows(kv, 3)
    q, k, sink = leaf(rows.q), leaf(kv.k), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    for sunk in (None, sink):
        got = attend(replace(rows, q=q), replace(kv, k=k), Spans(()), scale=1.0, sink_logit=sunk)
        (grad,) = torch.autograd.grad((got.out.sum(), got.lse.sum()), q, retain_graph=True)
        assert torch.equal(grad, torch.zeros_like(grad))
    (grad,) = torch.autograd.grad(got.lse.sum(), sink)
    assert grad.tolist() == [3.0] * 4


def test_what_is_not_selected_gets_no_gradient() -> None:
    kv = random_kv([9], heads=1, dim=8, dtype=torch.float64)
    rows = replace(random_rows(kv, 2), pos=torch.tensor([8, 4]))
    poison(kv, 0, 0, (0, 1))
    k, v = leaf(kv.k), leaf(kv.v)
    got = attend(rows, replace(kv, k=k, v=v), Spans((Span(absolute(2), absolute(6)),)), scale=1.0)
    for grad in torch.autograd.grad((got.out.sum(), got.lse.sum()), (k, v)):
        assert bool(grad[0, 0, 2:6].any(-1).all())
        assert not grad[0, 0, :2].any() and not grad[0, 0, 6:].any()
