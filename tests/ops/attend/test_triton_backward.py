"""The backward of attend's Triton kernels against the reference's gradients in fp64; in Python on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops import KVView, Lists, Rows, Selection, Span, Spans, absolute, attend, mix, relative
from longreach.ops.attend import triton_backward, triton_backward_launches, triton_pairs
from longreach.ops.mix import KeySet, attend_mixed
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.selections import packed, random_lists, random_selection
from tests.ops.attend.kernels import HALF, here, needs_gpu


def gradients(
    rows: Rows, kv: KVView, selection: Selection, impl: str, *, seed: int = 0, wide: bool = False, **logits: Any
) -> list[Tensor]:
    """out, lse and the gradients of q, k, v, log-weights and the sink, on the CPU."""
    weight, sink = getattr(selection, "log_weight", None), logits.pop("sink_logit", None)
    leaves = [rows.q, kv.k, kv.v, *(x for x in (weight, sink) if x is not None)]
    leaves = [here(x.double() if wide else x).detach().clone().requires_grad_() for x in leaves]
    q, k, v, *rest = leaves
    chosen = here(selection)
    if weight is not None:
        chosen = replace(chosen, log_weight=rest.pop(0))
    given = {"scale": 0.3, **logits, "sink_logit": rest[0] if rest else None}
    got = attend(replace(here(rows), q=q), replace(here(kv), k=k, v=v), chosen, **given, impl=impl)
    draw = torch.Generator().manual_seed(seed)
    dout, dlse = (here(torch.randn(x.shape, generator=draw)).to(x.dtype) for x in (got.out, got.lse))
    found = torch.autograd.grad((got.out, got.lse), leaves, (dout, dlse.masked_fill(got.is_empty, 0.0)))
    return [x.detach().cpu() for x in (got.out, got.lse, *found)]


def near(got: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> None:
    """Within rounding of the largest entry, as all are sums of some dozens of such terms."""
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert bool((a.isfinite() == b.isfinite()).all())
        size = float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0
        unit = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        a, b = a.double().nan_to_num(neginf=0.0), b.double().nan_to_num(neginf=0.0)
        torch.testing.assert_close(a, b, rtol=0, atol=unit * size + 1e-12, msg=lambda text: f"result {n}: {text}")  # noqa: B023


def agrees(rows: Rows, kv: KVView, selection: Selection, **logits: Any) -> None:
    got = gradients(rows, kv, selection, "triton", **logits)
    near(got, gradients(rows, kv, selection, "reference", wide=True, **logits), rows.q.dtype)


def clean(kv: KVView) -> KVView:
    """Zeros for the poison in what is not filled: gradients of all memory are compared."""
    return replace(kv, k=kv.k.nan_to_num(0.0), v=kv.v.nan_to_num(0.0))


@pytest.mark.parametrize("kind", ["spans", "lists"])
@pytest.mark.parametrize("per", ["kv", "query"])
@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("dim", [8, 24])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", ["plain", "capped", "sunk"])
@pytest.mark.covering
def test_gradients(kind: Any, per: Any, group: int, dim: int, dtype: torch.dtype, shape: str) -> None:
    seed = group + dim
    kv = clean(random_kv([40, 7, 0, 21], heads=2, dim=dim, dtype=dtype, seed=seed))
    rows = random_rows(kv, 12, group=group, seed=seed)
    selection = random_selection(kind, rows, kv, per=per, seed=seed)
    if isinstance(selection, Lists) and selection.log_weight is not None:
        selection = replace(selection, log_weight=selection.log_weight.nan_to_num(0.0))
    sink = torch.randn(2 * group) if shape == "sunk" else None
    agrees(rows, kv, selection, softcap=1.5 if shape == "capped" else None, sink_logit=sink)


@pytest.mark.parametrize(
    "lists",
    [
        {"block": 1}, {"block": 5, "weighted": True}, {"block": 16}, {"block": 40, "weighted": True},
        {"shared": True, "weighted": True, "block": 4}, {"mapped": 3, "weighted": True, "overflow": 0.3},
        {"one": True, "weighted": True, "per": "query"}, {"per": "query", "overflow": 0.5, "block": 3},
        {"block": 16, "overflow": 0.3}, {"block": 17, "per": "query"}, {"block": 20, "shared": True},
    ],
    ids=lambda given: " ".join(given),
)  # fmt: skip
def test_lists(lists: dict[str, Any]) -> None:
    """Blocks smaller and larger than a tile, shared lists, head maps, overflows; of rows, and of tiles of rows."""
    kv = clean(random_kv([60, 33], heads=2, dim=16, seed=3))
    rows = random_rows(kv, 10, group=2, seed=3)
    made = random_lists(rows, kv, seed=3, **lists)
    if made.log_weight is not None:
        made = replace(made, log_weight=made.log_weight.nan_to_num(0.0))
    agrees(rows, kv, made)


@pytest.mark.parametrize("block", [16, 40])
def test_a_block_that_many_rows_list(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pairs than one program takes, before and after blocks that few list; and rows in several chunks."""
    kv = clean(random_kv([130, 125], heads=2, dim=16, seed=5))
    rows = random_rows(kv, 120, group=2, seed=5)
    popular = torch.rand(120, 2, 1, generator=torch.Generator().manual_seed(0)) < 0.8
    index = torch.where(popular, 0, 1)
    lists = Lists(torch.cat([index, index + 1], 2).int(), torch.full((120, 2), 2), block=block)
    agrees(rows, kv, lists)
    for many in (1 << 13, 1 << 30):
        monkeypatch.setattr(triton_pairs, "PARTS_BYTES", many)
        agrees(rows, kv, lists)


def test_many_rows_without_a_gradient_go_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as with one."""
    kv = clean(random_kv([90, 70], heads=2, dim=16, seed=5))
    rows = random_rows(kv, 40, group=2, seed=5)
    lists = random_lists(rows, kv, block=16, overflow=0.2, weighted=False, seed=5)
    want = gradients(rows, kv, lists, "triton")
    monkeypatch.setattr(triton_backward, "MANY", 40)
    assert triton_backward.by_block(rows, kv, lists)
    got = attend(here(rows), here(kv), here(lists), scale=0.3, impl="triton")
    assert torch.equal(got.out.cpu(), want[0]) and torch.equal(got.lse.cpu(), want[1])


def test_spans_of_whole_sequences() -> None:
    """Dense, a window with sinks (which overlap early on), and none, for many tiles of rows in no order."""
    kv = clean(random_kv([40, 21], heads=1, dim=16, seed=1))
    order = torch.randperm(61, generator=torch.Generator().manual_seed(0))
    seq = torch.arange(2).repeat_interleave(torch.tensor([40, 21]))[order]
    rows = Rows(torch.randn(61, 2, 16), seq, torch.cat([torch.arange(40), torch.arange(21)])[order])
    sinks = Spans((Span(absolute(0), absolute(3)), Span(relative(-20), relative(1))))
    for selection in (Spans.dense(), sinks, Spans(())):
        agrees(rows, kv, selection)


def test_few_blocks_of_keys_are_split_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backward_launches, "PROGRAMS", 20)
    kv = clean(random_kv([40, 21], heads=2, dim=8, dtype=HALF))
    rows = random_rows(kv, 30)
    agrees(rows, kv, Spans((Span(absolute(0), absolute(3)), Span(relative(-20), relative(1)))))


def block_mka(documents: list[int], block: int) -> tuple[Rows, KVView, KVView, Spans, Spans, Lists]:
    """Documents packed into one sequence: (rows, tokens, summaries, window, earlier summaries, recalled blocks)."""
    draw = torch.Generator().manual_seed(0)
    count, heads, dim = sum(documents), 2, 16
    start = torch.cat([torch.full((n,), sum(documents[:i])) for i, n in enumerate(documents)])
    slot = torch.arange(count)
    first = torch.maximum(slot // block * block - block, start)  # own block and the one before
    rows = Rows(torch.randn(count, 2 * heads, dim, generator=draw), torch.zeros_like(slot), slot)
    k, v = torch.randn(2, 1, heads, count, dim, generator=draw)
    tokens = KVView(k, v, torch.tensor([count]))
    k2, v2 = (x[:, :, : count // block * block].unflatten(2, (-1, block)).mean(3) for x in (k, v))
    summaries = KVView(k2.contiguous(), v2.contiguous(), torch.tensor([count // block]))
    begin, end = -(-start // block), first // block
    used = (end - begin).clamp(min=0)
    index = (
        begin[:, None, None] + torch.rand(count, heads, 3, generator=draw).mul(used[:, None, None].clamp(min=1)).long()
    )
    index = index.sort(-1).values
    index = torch.where(index == index.roll(1, -1), index + 1, index).sort(-1).values
    distinct = (index.diff(dim=-1) > 0).all(-1) & (index[..., -1] < end[:, None])
    lists = Lists(
        index.int(), torch.where(distinct, used.clamp(max=3)[:, None], used.clamp(max=1)[:, None]), block=block
    )
    window = Spans((Span(absolute(first[:, None]), relative(1)),))
    earlier = Spans((Span(absolute(begin[:, None]), absolute(end[:, None])),))
    return rows, tokens, summaries, window, earlier, lists


@pytest.mark.parametrize("together", [False, True], ids=["mix", "attend_mixed"])
@pytest.mark.parametrize(("block", "documents"), [(4, [21, 29]), (16, [70, 61])])
def test_window_summaries_and_recall_of_packed_documents(block: int, documents: list[int], together: bool) -> None:
    """As block-wise MKA trains: three sets, mixed; against the same by the reference. Some weights are 0."""
    rows, tokens, summaries, window, earlier, lists = block_mka(documents, block)
    weights = torch.rand(sum(documents), 3)
    weights[torch.rand(weights.shape) < 0.2] = 0.0
    weights[:5] = 0.0

    def run(impl: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = (rows.q, tokens.k, tokens.v, summaries.k, summaries.v, weights)
        leaves = [here(x.to(dtype)).requires_grad_() for x in inputs]
        q, k, v, k2, v2, w = leaves
        mine = replace(here(rows), q=q)
        sets = (replace(here(tokens), k=k, v=v), window), (replace(here(tokens), k=k, v=v), lists)
        far = replace(mine, pos=torch.full_like(mine.pos, 99))  # summaries are seen by the span's bounds alone
        both = [
            *(KeySet(mine, kv, here(chosen)) for kv, chosen in sets),
            KeySet(far, replace(here(summaries), k=k2, v=v2), here(earlier)),
        ]
        if together:
            got = attend_mixed(both, w, scale=0.25, impl=impl)
        else:
            got = mix([attend(*each, scale=0.25, impl=impl) for each in both], w, impl=impl)
        loss = (got.out * here(torch.arange(16.0)).to(got.out.dtype)).sum() + got.lse.masked_fill(
            got.is_empty, 0.0
        ).sum()
        return [x.detach().cpu() for x in (got.out, got.lse, *torch.autograd.grad(loss, leaves))]

    near(run("triton", torch.float32), run("reference", torch.float64), torch.float32)


def test_the_same_bits_at_each_call() -> None:
    rows, tokens, _, window, _, lists = block_mka([9, 12], 4)
    for selection in (window, lists):
        first, again = (gradients(rows, tokens, selection, "triton") for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", ["spans", "lists", "pairs"])
def test_what_no_row_selects_is_not_read_and_gets_no_gradient(kind: str) -> None:
    kv = clean(random_kv([40], heads=1, dim=16))
    rows = replace(random_rows(kv, 3), pos=torch.tensor([39, 30, 20]))
    spans = Spans((Span(absolute(5), absolute(9)), Span(relative(-3), relative(1))))
    lists = Lists(torch.tensor([[[1, 2]], [[2, 1]], [[1, 0]]]), torch.tensor([[2], [2], [1]]), block=4)
    pairs = Lists(torch.tensor([[[2]], [[0]], [[0]]]), torch.ones(3, 1).long(), block=16)
    selection: Selection = {"spans": spans, "lists": lists, "pairs": pairs}[kind]
    read = selection.mask(rows, kv).any(0).any(0)
    want = gradients(rows, kv, selection, "triton")
    poison(kv, 0, 0, [n for n in range(40) if not read[n]])
    got = gradients(rows, kv, selection, "triton")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for grad in got[3:]:
        assert not grad[0, 0][~read].any() and bool(grad[0, 0][read].any(-1).all())


def test_nan_of_one_sequence_stays_in_it() -> None:
    kv = clean(random_kv([20, 20], heads=1, dim=16))
    rows = random_rows(kv, 8)
    for selection in (Spans.dense(), random_lists(rows, kv, block=4, seed=1)):
        want = gradients(rows, kv, selection, "triton")
        bad = rows.seq == 1
        q = rows.q.masked_fill(bad[:, None, None], torch.nan)
        got = gradients(replace(rows, q=q), kv, selection, "triton")
        for n in (0, 1, 2):
            assert torch.equal(got[n][~bad], want[n][~bad])
        for n in (3, 4):
            assert torch.equal(got[n][0], want[n][0])


def test_strided_and_unwanted_inputs() -> None:
    """Keys laid out as models make them, queries as a slice; a gradient of the keys alone, of the queries alone."""
    kv = random_kv([30], heads=2, dim=16, memory="tokens")
    kv = replace(kv, k=kv.k.nan_to_num(0.0), v=kv.v.nan_to_num(0.0))
    rows = random_rows(kv, 6)
    rows = replace(rows, q=torch.randn(6, 4, 32)[:, :, 8:24])
    agrees(rows, kv, Spans.dense())
    for selection in (Spans.dense(), random_lists(rows, kv, weighted=False, seed=1)):
        want = gradients(rows, kv, selection, "triton")
        for n, name in enumerate(("q", "k", "v")):
            given = {"q": rows.q, "k": kv.k, "v": kv.v}
            leaf = given[name] = here(given[name]).clone().requires_grad_()
            q, k, v = (here(x) for x in given.values())
            got = attend(
                replace(here(rows), q=q), replace(here(kv), k=k, v=v), here(selection), scale=0.3, impl="triton"
            )
            draw = torch.Generator().manual_seed(0)
            dout, dlse = (here(torch.randn(x.shape, generator=draw)) for x in (got.out, got.lse))
            (grad,) = torch.autograd.grad((got.out, got.lse), leaf, (dout, dlse.masked_fill(got.is_empty, 0.0)))
            assert torch.equal(grad.cpu(), want[2 + n])


def test_no_rows_and_no_keys() -> None:
    kv = clean(random_kv([0, 0], heads=2, dim=16))
    for count in (0, 3):
        rows = random_rows(kv, count)
        for selection in (Spans.dense(), random_lists(rows, kv, seed=1)):
            got = gradients(rows, kv, selection, "triton")
            assert all(not x.any() for x in got[2:])


def test_a_graph_in_a_graph_is_refused() -> None:
    kv = clean(random_kv([9], heads=1, dim=16))
    rows = random_rows(kv, 2)
    q = here(rows.q).requires_grad_()
    got = attend(replace(here(rows), q=q), here(kv), Spans.dense(), scale=1.0, impl="triton")
    weight = torch.ones_like(got.out, requires_grad=True)
    (grad,) = torch.autograd.grad(got.out, q, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_what_the_backward_cannot_do_is_refused() -> None:
    kv = random_kv([9], heads=1, dim=16)
    rows = random_rows(kv, 2)
    rows = replace(rows, q=rows.q.requires_grad_())
    lists = packed(random_lists(rows, kv))
    paged, kept = random_kv([9], heads=1, dim=16, page=4), random_kv([9], heads=1, dim=16, evicted=True)
    for memory, selection, message in (
        (paged, Spans.dense(), "takes contiguous memory, not a block table; an input requires a gradient"),
        (kept, Spans.dense(), "takes slots that are positions, not slot_pos; an input requires a gradient"),
        (kv, lists, "takes Spans and Lists, got PackedLists; an input requires a gradient; use impl='reference'"),
    ):
        with pytest.raises(Unsupported, match=message):
            attend(here(rows), here(memory), here(selection), scale=1.0, impl="triton")
        with torch.no_grad():
            attend(here(rows), here(memory), here(selection), scale=1.0, impl="triton")


def test_changed_inputs_are_noticed() -> None:
    kv = clean(random_kv([9], heads=1, dim=16))
    rows = random_rows(kv, 2)
    q = here(rows.q).requires_grad_()
    memory = here(kv)
    got = attend(replace(here(rows), q=q), memory, Spans.dense(), scale=1.0, impl="triton")
    memory.k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.out.sum().backward()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_long_on_a_gpu(dtype: torch.dtype, group: int) -> None:
    """Prompts of several thousand tokens at head dim 128: dense, window, recalled blocks; the same bits twice."""
    kv = random_kv([3000, 1000], heads=2, dim=128, dtype=dtype)
    kv = clean(kv)
    seq = torch.arange(2).repeat_interleave(torch.tensor([3000, 1000]))
    rows = Rows(torch.randn(4000, 2 * group, 128).to(dtype), seq, torch.cat([torch.arange(3000), torch.arange(1000)]))
    blocks = (rows.pos // 64).clamp(min=1)
    index = (torch.rand(4000, 2, 4) * blocks[:, None, None]).int().sort(-1).values
    lists = Lists(index, torch.ones(4000, 2).int(), block=64)
    for selection in (Spans.dense(), Spans.window(500), lists):
        got = gradients(rows, kv, selection, "triton")
        near(got, gradients(rows, kv, selection, "reference", wide=True), dtype)
        again = gradients(rows, kv, selection, "triton")
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
