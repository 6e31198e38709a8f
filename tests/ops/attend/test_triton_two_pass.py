"""attend's Triton kernels in their keeping modes: on a GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import Lists, RowRange, Rows, Spans, attend_from_logits, attend_with_logits, pooled_scores
from longreach.ops import score_keys as score
from longreach.ops.attend import triton as kernels
from longreach.ops.attend.triton_tuning import Tuning
from longreach.ops.attend.two_pass import (
    FROM_LOGITS_IMPLEMENTATIONS,
    SCORE_IMPLEMENTATIONS,
    WITH_LOGITS_IMPLEMENTATIONS,
)
from longreach.ops.impl import compiles
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.oracle import exact_attend
from longreach.testing.selections import random_lists, random_selection
from longreach.testing.tolerance import unit_roundoff
from tests.ops.attend.kept import check_kept, check_values
from tests.ops.attend.kernels import HALF, PLACE, held_to, here, needs_gpu
from tests.ops.attend.test_triton import halved
from tests.ops.cases import make_case
from tests.tiers import swept


@pytest.mark.parametrize("seed", swept(range(24), 6))
def test_any_case(seed: int) -> None:
    case = make_case(seed)
    if case.rows.q.dtype == torch.bfloat16 and PLACE == "cpu":
        case = replace(case, rows=replace(case.rows, q=case.rows.q.half()), kv=halved(case.kv))
    kept = check_kept(case.rows, case.kv, impl="triton", values=seed % 2 == 0, **case.logits)
    assert (kept.top is None) == (case.rows.q.dtype == torch.float32)
    selection = case.selection if seed % 3 else random_lists(case.rows, case.kv, seed=seed)
    check_values(case.rows, case.kv, selection, impl="triton", **case.logits)


@pytest.mark.covering
@pytest.mark.parametrize("dim", swept([80, 32, 128, 256], 2))
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_head_dims_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    kv = random_kv([150, 0, 67], heads=2, dim=dim, dtype=dtype, page=16 if dim % 32 else None, memory="packed")
    rows = random_rows(kv, 4, group=4)
    for values in (True, False):
        check_kept(rows, kv, impl="triton", values=values)
    check_values(rows, kv, random_lists(rows, kv, weighted=True), impl="triton")


@pytest.mark.parametrize(
    ("group", "dtype"), swept([(3, HALF), (7, torch.float32), (1, HALF), (2, torch.float32), (8, HALF), (16, HALF)], 2)
)
def test_groups(group: int, dtype: torch.dtype) -> None:
    kv = random_kv([33, 21], heads=2, dim=16, page=5, dtype=dtype)
    rows = random_rows(kv, 2, group=group)
    check_kept(rows, kv, impl="triton", values=group % 2 == 0, softcap=3.0)
    for per in ("kv", "query"):
        check_values(rows, kv, random_selection("lists", rows, kv, per=per, seed=group), impl="triton")


@pytest.mark.parametrize(("runs", "group"), swept([((16, 3, 1), 3), (None, 2), ((8, 1, 5), 4)], 2), ids=str)
def test_several_rows_a_sequence(runs: tuple[int, ...] | None, group: int) -> None:
    kv = random_kv([25, 17, 9], heads=2, dim=16, page=16, dtype=HALF)
    if runs is None:
        rows = random_rows(kv, 9, group=group)
    else:
        seq = torch.arange(3).repeat_interleave(torch.tensor(runs))
        pos = torch.cat([n - r + torch.arange(r) for n, r in zip((25, 17, 9), runs, strict=True)])
        rows = Rows(
            torch.randn(sum(runs), 2 * group, 16).to(HALF), seq, pos, tuple(RowRange(r, b) for b, r in enumerate(runs))
        )
    check_kept(rows, kv, impl="triton", values=runs is None, sink_logit=torch.randn(2 * group))
    check_values(rows, kv, random_lists(rows, kv, shared=True, weighted=True), impl="triton")
    if runs is None:
        check_values(rows, kv, Spans.window(12), impl="triton")


@pytest.mark.parametrize(("programs", "block"), swept([(2, 64), (5, 16), (1, 16), (40, 32)], 2))
def test_however_work_is_dealt_out(programs: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks lie at their multiples wherever a program's share starts."""
    monkeypatch.setattr(Tuning, "programs", lambda self, device: programs)
    given = Tuning(block, 4, 2, 1, unit=block, chained=PLACE == "cuda")
    monkeypatch.setattr(kernels, "keeping_tuning", lambda *_, **__: given)
    kv = random_kv([5, 0, 300, 64], heads=2, dim=16, dtype=HALF)
    rows = replace(random_rows(kv, 4), seq=torch.arange(4), pos=torch.tensor([4, 0, 299, 63]))
    for values in (True, False):
        assert check_kept(rows, kv, impl="triton", values=values).block == block
    check_values(rows, kv, random_lists(rows, kv), impl="triton")


def test_one_program_a_stream_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_DEALT", 0)
    kv = random_kv([50, 20], heads=2, dim=16, page=16, dtype=HALF)
    rows = random_rows(kv, 7)
    for values in (True, False):
        check_kept(rows, kv, impl="triton", values=values, sink_logit=torch.randn(4))
    check_values(rows, kv, random_lists(rows, kv), impl="triton", sink_logit=torch.randn(4))


@pytest.mark.parametrize("page", [None, 4])
def test_values_are_not_read_to_score_nor_keys_for_values(page: int | None) -> None:
    kv = random_kv([60, 31], heads=2, dim=16, page=page, dtype=HALF)
    rows = random_rows(kv, 6)
    lists = random_lists(rows, kv, seed=2)
    lse, kept = score(here(rows), here(kv), scale=0.3, impl="triton")
    want = attend_from_logits(here(rows), here(kv), here(lists), kept, impl="triton")
    unseen = replace(kv, k=kv.k.clone(), v=torch.full_like(kv.v, torch.nan))
    for b in range(2):  # nor are keys past what the rows of a sequence can see
        furthest = max([int(p) for s, p in zip(rows.seq, rows.pos, strict=True) if int(s) == b], default=-1)
        for g in range(2):
            poison(unseen, b, g, range(furthest + 1, (60, 31)[b]))
    again, same = score(here(rows), here(unseen), scale=0.3, impl="triton")
    assert torch.equal(again, lse)
    got = pooled_scores(here(rows), here(unseen), scale=0.3, lse=lse, logits=kept, impl="triton")
    for r, reach in enumerate(torch.minimum(kv.seq_lens[rows.seq], rows.pos + 1).tolist()):
        assert torch.equal(same.natural(reach)[r], kept.natural(reach)[r])
        assert bool(got[r, :, :reach].isfinite().all())
    spoilt = replace(kv, k=torch.full_like(kv.k, torch.nan), v=kv.v.clone())
    read = lists.streamed(rows, kv)
    for b, length in enumerate((60, 31)):
        for g in range(2):
            used = read[rows.seq == b][:, g].any(0)
            poison(spoilt, b, g, (n for n in range(length) if not bool(used[n])))
    got_values = attend_from_logits(here(rows), here(spoilt), here(lists), kept, impl="triton")
    assert torch.equal(got_values.out, want.out) and torch.equal(got_values.lse, want.lse)


def test_logits_past_what_a_row_reaches_are_not_used() -> None:
    kv = random_kv([60, 31], heads=2, dim=16, dtype=HALF)
    rows = random_rows(kv, 6)
    _, kept = score(here(rows), here(kv), scale=0.3, impl="triton")
    reach = torch.minimum(kv.seq_lens[rows.seq], rows.pos + 1).tolist()
    x = kept.x.clone()
    for r, n in enumerate(reach):
        x[r, :, n:] = torch.nan
    for selection in (random_lists(rows, kv, seed=2), Spans.dense(), random_lists(rows, kv, shared=True, seed=3)):
        want = attend_from_logits(here(rows), here(kv), here(selection), kept, impl="triton")
        got = attend_from_logits(here(rows), here(kv), here(selection), replace(kept, x=x), impl="triton")
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_logits_of_some_rows() -> None:
    """Those of a later pass over fewer rows, and what the reference kept."""
    kv = random_kv([60, 31], heads=3, dim=16)
    rows, some = random_rows(kv, 6, group=3), torch.tensor([4, 1])
    _, kept = score(here(rows), here(kv), scale=0.3, impl="triton")
    fewer = rows.take(some)
    want = exact_attend(fewer, kv, Spans.window(9), scale=0.3)
    for logits in (kept.take(some.to(PLACE)), here(score(fewer, kv, scale=0.3, impl="reference")[1])):
        held_to(attend_from_logits(here(fewer), here(kv), Spans.window(9), logits, impl="triton"), want, torch.float32)


def test_no_rows_and_no_keys() -> None:
    kv = random_kv([0, 0], heads=2, dim=16, dtype=HALF)
    for values in (True, False):
        assert check_kept(random_rows(kv, 0), kv, impl="triton", values=values).x.shape == (0, 2, 3, 2)
        check_kept(random_rows(kv, 3), kv, impl="triton", values=values, sink_logit=torch.tensor([1.0, 2.0, 3.0, -9.0]))
    check_values(random_rows(kv, 0), kv, Spans.dense(), impl="triton")
    check_values(random_rows(kv, 3), kv, Spans.dense(), impl="triton")


def test_large_differences_of_logits() -> None:
    """Beyond what fp16 holds relative to the largest: a weight of nothing, never NaN."""
    kv = random_kv([40], heads=1, dim=16, dtype=HALF)
    rows = replace(random_rows(kv, 1), seq=torch.zeros(1).long(), pos=torch.tensor([39]))
    lse, kept = score(here(rows), here(kv), scale=1e5, impl="triton")
    got = attend_from_logits(here(rows), here(kv), Spans.dense(), kept, impl="triton")
    want = exact_attend(rows, kv, Spans.dense(), scale=1e5)
    torch.testing.assert_close(lse.double().cpu(), want.lse, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(got.out.double().cpu(), want.out, rtol=2e-3, atol=2e-3)


def test_what_the_kernels_cannot_do_is_refused() -> None:
    double = random_kv([5], heads=1, dim=16, dtype=torch.float64)
    rows = random_rows(double, 1)
    _, kept = score(rows, double, scale=1.0)
    for call in (
        lambda: attend_with_logits(here(rows), here(double), scale=1.0, impl="triton"),
        lambda: score(here(rows), here(double), scale=1.0, impl="triton"),
        lambda: attend_from_logits(here(rows), here(double), Spans.dense(), here(kept), impl="triton"),
    ):
        with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
            call()
    kv = random_kv([5], heads=1, dim=16)
    rows = random_rows(kv, 1)
    wants = replace(rows, q=rows.q.clone().requires_grad_())
    with pytest.raises(Unsupported, match="no backward pass and q requires a gradient"):
        score(here(wants), here(kv), scale=1.0, impl="triton")
    _, kept = score(wants, kv, scale=1.0)
    with pytest.raises(Unsupported, match="no backward pass and logits require a gradient"):
        attend_from_logits(here(rows), here(kv), Spans.dense(), here(kept), impl="triton")


def test_kernels_are_named() -> None:
    for op in (WITH_LOGITS_IMPLEMENTATIONS, SCORE_IMPLEMENTATIONS, FROM_LOGITS_IMPLEMENTATIONS):
        assert op.names() == ("reference", "triton", "numba")
        expected = "triton" if PLACE == "cuda" else "numba" if compiles(torch.device(PLACE)) else "reference"
        assert op.choose("auto", torch.device(PLACE)) == expected


@needs_gpu
@pytest.mark.gpu
def test_a_captured_chain_follows_its_lengths() -> None:
    """Score, pool, attend values in one graph: replayed with other queries and lengths it gives theirs."""
    lengths = [3000, 700, 2048]
    kv = here(random_kv(lengths, heads=2, dim=64, dtype=torch.bfloat16, page=64))
    rows = Rows(torch.randn(3, 8, 64, device=PLACE).bfloat16(), *(torch.arange(3, device=PLACE) for _ in range(2)))
    rows.pos.copy_(torch.tensor(lengths) - 1)
    index = torch.randint(0, 600, (3, 2, 64), device=PLACE).sort(-1).values.int()
    index[..., 1:] = torch.arange(1, 64, device=PLACE).int() * 9
    index[..., 0] = 0
    lists = Lists(index, torch.full((3, 2), 64, device=PLACE))

    def chain() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lse, kept = score(rows, kv, scale=0.125, impl="triton")
        s = pooled_scores(rows, kv, scale=0.125, lse=lse, logits=kept, impl="triton")
        return lse, s, attend_from_logits(rows, kv, lists, kept, impl="triton").out

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for seed, filled in ((1, [2500, 650, 2047]), (2, [3000, 601, 640])):
        rows.q.copy_(torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16())
        kv.seq_lens.copy_(torch.tensor(filled))
        rows.pos.copy_(torch.tensor(filled) - 1)
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(captured, chain(), strict=True):
            for r, n in enumerate(filled):
                shown = slice(0, n) if got is captured[1] else slice(None)
                assert torch.equal(got[r][..., shown], want[r][..., shown])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_contexts(dtype: torch.dtype) -> None:
    lengths = [40_000, 3, 9_001]
    kv = random_kv(lengths, heads=2, dim=128, page=64, dtype=dtype)
    rows = replace(random_rows(kv, 3, group=4), seq=torch.arange(3), pos=torch.tensor(lengths) - 1)
    wide = replace(kv, k=kv.k.double(), v=kv.v.double())
    precise = replace(rows, q=rows.q.double())
    lists = random_lists(rows, kv)
    want_lse, want_kept = score(precise, wide, scale=0.088, impl="reference")
    lse, kept = score(here(rows), here(kv), scale=0.088, impl="triton")
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-5, atol=1e-4)
    want = attend_from_logits(precise, wide, lists, want_kept, impl="reference")
    got = attend_from_logits(here(rows), here(kv), here(lists), kept, impl="triton")
    step = unit_roundoff(dtype) if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(
        got.out.cpu().double(), want.out, rtol=0.0, atol=4 * step * float(kv.v.nan_to_num().abs().max())
    )
    scores = pooled_scores(here(rows), here(kv), scale=0.088, lse=lse, logits=kept, impl="triton").cpu().double()
    whole = pooled_scores(precise, wide, scale=0.088, lse=want_lse, logits=want_kept, impl="reference")
    for r, n in enumerate(lengths):
        torch.testing.assert_close(
            scores[r, :, :n], whole[r, :, :n], rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-9
        )
