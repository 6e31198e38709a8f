"""attend's Triton kernels against the fp64 oracle: on a GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import (
    KVView,
    Lists,
    Partial,
    RowRange,
    Rows,
    Span,
    Spans,
    absolute,
    attend,
    attend_split,
    merge,
    relative,
)
from longreach.ops.attend import resolve
from longreach.ops.attend import triton as kernels
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.oracle import exact_attend
from longreach.testing.selections import Kind, random_lists, random_selection, random_spans
from tests.ops.attend.kernels import HALF, PLACE, check, held_to, here, needs_gpu
from tests.ops.cases import make_case
from tests.tiers import swept

KINDS: tuple[Kind, ...] = ("spans", "lists", "packed")
STRIDED = ("seq", "pos", "seq_lens", "block_table", "row_to_list", "head_map", "sink_logit", "q")


@pytest.mark.parametrize("seed", swept(range(60), 8))
def test_any_case(seed: int) -> None:
    case = make_case(seed)
    if case.rows.q.dtype == torch.bfloat16 and PLACE == "cpu":
        case = replace(case, rows=replace(case.rows, q=case.rows.q.half()), kv=halved(case.kv))
    got = check(case.rows, case.kv, case.selection, **case.logits)
    assert got.out.dtype == got.lse.dtype == torch.float32


def halved(kv: KVView) -> KVView:
    return replace(kv, k=kv.k.half(), v=kv.v.half())


@pytest.mark.covering
@pytest.mark.parametrize("dim", swept([80, 64, 32, 96, 128, 256], 2))
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_head_dims_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    kv = random_kv([150, 0, 67], heads=2, dim=dim, dtype=dtype, page=16 if dim % 32 else None, memory="packed")
    check(random_rows(kv, 4, group=4), kv, Spans.dense())
    check(random_rows(kv, 4, group=4), kv, random_lists(random_rows(kv, 4, group=4), kv, weighted=True))


@pytest.mark.covering
@pytest.mark.parametrize("group", [1, 7, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_groups(group: int, kind: Kind) -> None:
    kv = random_kv([33, 21], heads=2, dim=16, page=5)
    rows = random_rows(kv, 3, group=group)
    for per in ("kv", "query"):
        check(rows, kv, random_selection(kind, rows, kv, per=per, seed=group))


@pytest.mark.parametrize(
    ("runs", "group"), swept([((9, 3, 5), 3), (None, 2), ((70, 0, 0), 1), ((8, 8, 8), 2), ((1, 1, 1), 1)], 2), ids=str
)
def test_runs_of_rows(runs: tuple[int, ...] | None, group: int) -> None:
    """Rows of a sequence read its keys together: verification, chunks of prompts, and rows in no known order."""
    kv = random_kv([90, 40, 77], heads=2, dim=16, page=16)
    if runs is None:
        rows = random_rows(kv, 9, group=group)
    else:
        seq = torch.arange(3).repeat_interleave(torch.tensor(runs))
        pos = torch.cat([n - r + torch.arange(r) for n, r in zip((90, 40, 77), runs, strict=True)])
        known = tuple(RowRange(r, b) for b, r in enumerate(runs) if r)
        rows = Rows(torch.randn(sum(runs), 2 * group, 16), seq, pos, known)
    check(rows, kv, Spans.dense())
    check(rows, kv, Spans((Span(absolute(0), absolute(3)), Span(relative(-9), relative(1)))))
    check(rows, kv, random_lists(rows, kv, shared=True, weighted=True))
    check(rows, kv, random_spans(rows, kv, per="query", spans=2))


def test_a_run_longer_than_a_tile() -> None:
    kv = random_kv([75], heads=1, dim=16, page=16)
    rows = Rows(torch.randn(70, 2, 16), torch.zeros(70, dtype=torch.int64), 5 + torch.arange(70), (RowRange(70, 0),))
    check(rows, kv, Spans.dense())


@pytest.mark.parametrize(("programs", "block"), swept([(2, 64), (5, 16), (1, 16), (40, 32)], 2))
def test_however_work_is_dealt_out(programs: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs than work, fewer than streams, shares that end inside a stream and between two."""
    monkeypatch.setattr(Tuning, "programs", lambda self, device: programs)
    kv = random_kv([5, 0, 300, 64], heads=2, dim=16)
    rows = replace(random_rows(kv, 4), seq=torch.arange(4), pos=torch.tensor([4, 0, 299, 63]))
    for selection in (Spans.dense(), random_lists(rows, kv), random_spans(rows, kv, spans=3)):
        got = kernels.launch(
            here(rows), here(kv), here(selection), scale=0.25, softcap=None, sink_logit=None, split=None,
            tune=Tuning(block, 4, 2, 1, chained=PLACE == "cuda"),
        )[0]  # fmt: skip
        held_to(got, exact_attend(rows, kv, selection, scale=0.25), torch.float32)


def test_one_stream_far_longer_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces are put together in more than one chunk of each size."""
    monkeypatch.setattr(Tuning, "programs", lambda self, device: 90)
    kv = random_kv([3, 2300, 0, 5, 1, 9, 2, 4], heads=1, dim=128)
    rows = replace(random_rows(kv, 8, group=2), seq=torch.arange(8), pos=kv.seq_lens.long() - 1)
    for selection in (Spans.dense(), random_lists(rows, kv)):
        check(rows, kv, selection, sink_logit=torch.randn(2))


def test_one_program_a_stream_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_DEALT", 0)
    kv = random_kv([50, 20], heads=2, dim=16, page=16)
    rows = random_rows(kv, 7)
    for kind in KINDS:
        check(rows, kv, random_selection(kind, rows, kv, seed=3), sink_logit=torch.randn(4))


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_split(kind: Kind, evicted: bool, impl: str) -> None:
    """The parts are what lies on either side, and merge to the whole."""
    kv = random_kv([70, 0, 33], heads=2, dim=16, page=16, evicted=evicted)
    rows = random_rows(kv, 5)
    selection = random_selection(kind, rows, kv, seed=2)
    cuts = torch.randint(-20, 5, (5, 2))
    for split in (absolute(11), relative(-4), relative(cuts), absolute(cuts.abs())):
        parts = attend_split(here(rows), here(kv), here(selection), here(split), scale=0.25, impl=impl)
        whole = merge(*parts)
        held_to(whole, exact_attend(rows, kv, selection, scale=0.25), torch.float32)
        if isinstance(selection, Spans):
            first, second = (Span(absolute(0), split), Span(split, absolute(10**6)))
            both = [intersect(selection, part) for part in (first, second)]
            for got, part in zip(parts, both, strict=True):
                want = merged(rows, kv, part)
                torch.testing.assert_close(got.out.cpu(), want.out, rtol=2e-5, atol=2e-5)
                torch.testing.assert_close(got.lse.cpu(), want.lse, rtol=2e-5, atol=2e-5)


def intersect(selection: Spans, part: Span) -> tuple[Spans, Spans]:
    return selection, Spans((part,), selection.per)


def merged(rows: Rows, kv: KVView, both: tuple[Spans, Spans]) -> Partial:
    """The reference over the slots that both selections name, as lists of their slots."""
    mask = both[0].mask(rows, kv) & both[1].mask(rows, kv)
    order = mask.int().sort(dim=-1, descending=True, stable=True).indices
    return attend(rows, kv, Lists(order, mask.sum(-1)), scale=0.25, impl="reference")


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [None, 4])
def test_slots_that_no_row_selects_are_not_read(kind: Kind, page: int | None) -> None:
    kv = random_kv([60, 31], heads=2, dim=16, page=page)
    rows = random_rows(kv, 6)
    for seed in range(3):
        selection = random_selection(kind, rows, kv, seed=seed)
        clean = attend(here(rows), here(kv), here(selection), scale=0.25, impl="triton")
        read = selection.streamed(rows, kv)
        spoilt = replace(kv, k=kv.k.clone(), v=kv.v.clone())
        for b, length in enumerate((60, 31)):
            for g in range(2):
                used = read[rows.seq == b][:, g].any(0)
                poison(spoilt, b, g, (n for n in range(length) if not bool(used[n])))
        again = attend(here(rows), here(spoilt), here(selection), scale=0.25, impl="triton")
        assert torch.equal(clean.out, again.out) and torch.equal(clean.lse, again.lse)


def test_no_rows_and_no_keys() -> None:
    kv = random_kv([0, 0], heads=2, dim=16)
    assert check(random_rows(kv, 0), kv, Spans.dense()).out.shape == (0, 4, 16)
    assert bool(check(random_rows(kv, 3), kv, Spans.dense()).is_empty.all())
    assert bool(check(random_rows(kv, 3), kv, Spans(())).is_empty.all())
    sunk = check(random_rows(kv, 3), kv, Spans.dense(), sink_logit=torch.tensor([1.0, 2.0, 3.0, -torch.inf]))
    assert torch.equal(sunk.lse[0].cpu(), torch.tensor([1.0, 2.0, 3.0, -torch.inf]))


def test_what_the_kernels_cannot_do_is_refused() -> None:
    kv = random_kv([5], heads=1, dim=16)
    rows = random_rows(kv, 1)
    with pytest.raises(Unsupported, match=r"no backward pass and q requires a gradient; use impl='reference'"):
        wants = replace(rows, q=rows.q.clone().requires_grad_())
        attend_split(here(wants), here(kv), Spans.dense(), absolute(2), scale=1.0, impl="triton")
    double = random_kv([5], heads=1, dim=16, dtype=torch.float64)
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        attend(here(random_rows(double, 1)), here(double), Spans.dense(), scale=1.0, impl="triton")


@pytest.mark.skipif(PLACE != "cpu", reason="kernels are compiled here")
def test_bf16_is_refused_where_the_interpreter_gets_it_wrong() -> None:
    kv = random_kv([9], heads=1, dim=16, dtype=torch.bfloat16)
    rows = Rows(torch.randn(1, 1, 16).bfloat16(), torch.zeros(1, dtype=torch.int64), torch.tensor([8]))
    with pytest.raises(Unsupported, match=r"TRITON_INTERPRET=1.*bf16.*use fp16, or fp32"):
        attend(rows, kv, Spans.dense(), scale=1.0, impl="triton")


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_kv([5], heads=1, dim=16)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(Unsupported, match="run on CUDA devices, got cpu"):
        attend(random_rows(kv, 1), kv, Spans.dense(), scale=1.0, impl="triton")


@needs_gpu
@pytest.mark.gpu
def test_auto_on_a_gpu(recwarn: Any) -> None:
    kv = here(random_kv([600, 600], heads=2, dim=64, dtype=torch.bfloat16))
    q = torch.randn(1200, 4, 64, device=PLACE, dtype=torch.bfloat16)
    seq = torch.arange(2, device=PLACE).repeat_interleave(600)
    pos = torch.arange(600, device=PLACE).repeat(2)
    whole = Rows(q, seq, pos, (RowRange(600, 0, 0), RowRange(600, 1, 0)))
    assert resolve("auto", whole, kv, Spans.dense()) == "sdpa_cudnn"
    assert (
        resolve("auto", replace(whole, runs=(RowRange(600, 0, 0), RowRange(600, 1, 3))), kv, Spans.dense()) == "triton"
    )
    assert resolve("auto", replace(whole, runs=None), kv, Spans.dense()) == "triton"
    assert resolve("auto", whole, kv, Spans.window(100)) == "triton"
    assert resolve("auto", whole, kv, Spans.dense(), softcap=3.0) == "triton"
    assert resolve("auto", whole.take(torch.tensor([3], device=PLACE)), kv, Spans.dense()) == "triton"
    assert resolve("reference", whole, kv, Spans.dense()) == "reference"


@needs_gpu
@pytest.mark.gpu
def test_memory_beyond_two_to_the_31_elements() -> None:
    """2^32 elements of K alone: offsets that wrapped around would read other keys."""
    length, heads, dim = 2**22, 8, 128
    k = torch.zeros(1, heads, length, dim, device=PLACE, dtype=torch.bfloat16)
    v = torch.zeros_like(k)
    q = torch.randn(1, heads, dim, device=PLACE, dtype=torch.bfloat16)
    k[0, :, -1], v[0, :, -1] = 4 * q[0], 1.0  # one heavy key, the very last
    zero = torch.zeros(1, dtype=torch.int64, device=PLACE)
    rows, kv = Rows(q, zero, zero + length - 1), KVView(k, v, zero + length)
    share = torch.sigmoid((4 * q.double().square().sum(-1)) * 0.2 - torch.log(torch.tensor(length - 1.0)))
    index = torch.tensor([[[0, length - 1]]], device=PLACE)
    for selection in (Spans.dense(), Span(relative(-9), relative(1))):
        selection = selection if isinstance(selection, Spans) else Spans((selection,))
        got = attend(rows, kv, selection, scale=0.2, impl="triton")
        if selection.is_dense:
            torch.testing.assert_close(got.out[0, :, 0].double(), share[0], rtol=1e-2, atol=1e-2)
        assert float(got.out.min()) > 0.9
    got = attend(rows, kv, Lists(index, torch.full((1, 1), 2, device=PLACE)), scale=0.2, impl="triton")
    assert float(got.out.min()) > 0.9


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_contexts(dtype: torch.dtype) -> None:
    """As near to fp64 as twice PyTorch in the same dtype, plus rounding, at lengths that fill the GPU."""
    lengths = [40_000, 3, 9_001]
    kv = random_kv(lengths, heads=2, dim=128, page=64, dtype=dtype)
    rows = replace(random_rows(kv, 3, group=4), seq=torch.arange(3), pos=torch.tensor(lengths) - 1)
    double = replace(kv, k=kv.k.double(), v=kv.v.double())
    for selection in (
        Spans.dense(),
        Spans((Span(absolute(0), absolute(4)), Span(relative(-2000), relative(1)))),
        random_lists(rows, kv),
    ):
        want = attend(replace(rows, q=rows.q.double()), double, selection, scale=0.088, impl="reference")
        got = attend(here(rows), here(kv), here(selection), scale=0.088, impl="triton")
        torchs = (want.out.to(dtype).double() - want.out).abs().max()
        rounding = 1e-5 * want.out.abs().max()
        assert float((got.out.cpu().double() - want.out).abs().max()) <= 2 * torchs + rounding
        torch.testing.assert_close(got.lse.cpu().double(), want.lse, rtol=1e-5, atol=1e-4)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, other ones between them."""
    return torch.stack([x, x.flip(0)], -1)[..., 0]


@pytest.mark.parametrize("what", swept(["all", *STRIDED], 1))
def test_strided_arguments(what: str) -> None:
    """Columns of an engine's tensors: what lies between their entries is not theirs."""
    kv = random_kv([20, 33, 7], heads=2, dim=32, page=4)
    rows = replace(random_rows(kv, 4), seq=torch.tensor([0, 1, 2, 1]), pos=torch.tensor([5, 32, 3, 20]))
    index, count = torch.tensor([[[0, 1, 2], [2, 5, 6]], [[3, 4, 5], [1, 3, 0]]]), torch.tensor([[3, 2], [2, 3]])
    lists = Lists(index, count, row_to_list=torch.tensor([0, 1, 0, 1]), head_map=torch.tensor([1, 0]))
    sink = torch.tensor([1.0, 2.0, 3.0, 4.0])
    wants = [exact_attend(rows, kv, s, scale=0.2, sink_logit=sink) for s in (Spans.dense(), lists)]
    rows, kv, lists, sink = here(rows), here(kv), here(lists), here(sink)
    for name in STRIDED if what == "all" else (what,):
        if name in ("seq", "pos", "q"):
            rows = replace(rows, **{name: strided(getattr(rows, name))})
        elif name in ("seq_lens", "block_table"):
            kv = replace(kv, **{name: strided(getattr(kv, name))})
        elif name in ("row_to_list", "head_map"):
            lists = replace(lists, **{name: strided(getattr(lists, name))})
        else:
            sink = strided(sink)
    for selection, want in zip((Spans.dense(), lists), wants, strict=True):
        got = attend(rows, kv, selection, scale=0.2, sink_logit=sink, impl="triton")
        held_to(got, want, torch.float32)
