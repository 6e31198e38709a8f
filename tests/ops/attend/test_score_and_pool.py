"""score_and_pool against the fp64 oracle of pooled_scores, in the reference and in Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.ops import KVView, RowRange, Rows, Spans
from longreach.ops.attend import score_and_pool
from longreach.ops.attend import triton as attending
from longreach.ops.attend import triton_score_and_pool as kernel
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import exact_attend, exact_logits, exact_pooled_scores
from longreach.testing.tolerance import pooled_bound, unit_roundoff, within
from tests.ops.attend.kept import HALF_STEP, gaps
from tests.ops.attend.kernels import HALF, HARDWARE, PLACE, here, here_all
from tests.ops.attend.test_triton import halved
from tests.ops.cases import make_case
from tests.ops.compiler import printed

impls = pytest.mark.parametrize("impl", ["reference", "triton"])


def check(rows: Rows, kv: KVView, impl: str, *, scale: float = 0.3, **more: Any) -> None:
    softcap = more.get("softcap")
    blind = replace(kv, v=torch.full_like(kv.v, torch.nan))
    got = score_and_pool(here(rows), here(blind), scale=scale, **here_all(more), impl=impl).double().cpu()
    sunk = exact_attend(rows, kv, Spans.dense(), scale=scale, **more)
    want = exact_pooled_scores(rows, kv, scale=scale, softcap=softcap, lse=sunk.lse)
    bound = pooled_bound(want, sunk, HARDWARE * unit_roundoff(torch.float32))
    if impl == "triton" and rows.q.dtype != torch.float32:
        exact = exact_logits(rows, kv, scale=scale, softcap=softcap)
        p = torch.exp(exact - sunk.lse.nan_to_num(neginf=0.0).unflatten(1, (kv.heads, -1))[:, :, None])
        bound = bound + 1.1 * HALF_STEP * (p * gaps(exact)).sum(-1)
    limit = kv.seq_lens[rows.seq] if kv.slot_pos is not None else torch.minimum(kv.seq_lens[rows.seq], rows.pos + 1)
    reached = (torch.arange(kv.capacity) < limit[:, None, None]).expand_as(want)
    assert got.shape == want.shape
    within("scores", got[reached], want[reached], bound[reached])
    assert not bool(got[reached & (want == 0)].any())
    assert impl == "triton" or bool(got[~reached].isnan().all())


@impls
@pytest.mark.parametrize("seed", range(10))
def test_any_case(impl: str, seed: int) -> None:
    case = make_case(seed)
    if case.rows.q.dtype == torch.bfloat16 and PLACE == "cpu":
        case = replace(case, rows=replace(case.rows, q=case.rows.q.half()), kv=halved(case.kv))
    check(case.rows, case.kv, impl, **case.logits)


@pytest.mark.covering
@pytest.mark.parametrize("group", [1, 7, 16])
@pytest.mark.parametrize(("dim", "dtype"), [(8, HALF), (32, HALF), (128, torch.float32)])
def test_groups_and_widths(group: int, dim: int, dtype: torch.dtype) -> None:
    kv = random_kv([150, 0, 67], heads=2, dim=dim, page=16, dtype=dtype)
    check(random_rows(kv, 5, group=group), kv, "triton")


@pytest.mark.parametrize(("runs", "group"), [((8, 1, 5), 4), ((16, 3, 1), 3)], ids=str)
def test_several_rows_a_sequence(runs: tuple[int, ...], group: int) -> None:
    kv = random_kv([25, 17, 9], heads=2, dim=16, page=16, dtype=HALF)
    seq = torch.arange(3).repeat_interleave(torch.tensor(runs))
    pos = torch.cat([n - r + torch.arange(r) for n, r in zip((25, 17, 9), runs, strict=True)])
    q = torch.randn(sum(runs), 2 * group, 16).to(HALF)
    rows = Rows(q, seq, pos, tuple(RowRange(r, b) for b, r in enumerate(runs)))
    check(rows, kv, "triton", sink_logit=torch.randn(2 * group))


@pytest.mark.parametrize(("programs", "block", "pieces"), [(1, 16, 64), (5, 16, 2), (40, 32, 4)])
def test_however_work_is_dealt_out(
    programs: int, block: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # more pieces than are put together at once, and more programs than there is work
    monkeypatch.setattr(Tuning, "programs", lambda self, device: programs)
    given = Tuning(block, 4, 2, 1, unit=block, chained=PLACE == "cuda")
    monkeypatch.setattr(attending, "keeping_tuning", lambda *_, **__: given)
    pooling = kernel.Pooling(chunk=64, shares=3, pieces=pieces)
    monkeypatch.setattr(kernel, "Pooling", lambda **_: pooling)
    kv = random_kv([5, 0, 300, 64], heads=2, dim=16, dtype=HALF)
    rows = replace(random_rows(kv, 4), seq=torch.arange(4), pos=torch.tensor([4, 0, 299, 63]))
    check(rows, kv, "triton", sink_logit=torch.randn(4))


def test_one_program_a_stream_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "MOST_DEALT", 0)
    kv = random_kv([50, 20], heads=2, dim=16, page=16, dtype=HALF)
    check(random_rows(kv, 7), kv, "triton", sink_logit=torch.randn(4))


@impls
def test_no_row(impl: str) -> None:
    kv = random_kv([5], heads=2, dim=8)
    assert score_and_pool(here(random_rows(kv, 0)), here(kv), scale=1.0, impl=impl).shape == (0, 2, kv.capacity)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_kv([5], heads=2, dim=8)
    rows = random_rows(kv, 2)
    with pytest.raises(InvalidInput, match="softcap: expected None or a finite number > 0"):
        score_and_pool(rows, kv, scale=1.0, softcap=0.0)
    with pytest.raises(InvalidInput, match="rows: expected Rows"):
        score_and_pool(None, kv, scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="unknown impl of score_and_pool 'fast'; known: auto, reference, triton"):
        score_and_pool(rows, kv, scale=1.0, impl="fast")
    with pytest.raises(Unsupported, match="no backward pass"):
        score_and_pool(replace(rows, q=rows.q.clone().requires_grad_()), kv, scale=1.0, impl="triton")


COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops import Rows, RowRange
from longreach.ops.attend import triton, triton_kernels
from longreach.ops.attend import triton_score_and_pool as kernel, triton_score_and_pool_kernels as kernels
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv

found = {}
with patch.object(kernel, "refuse", lambda *a: None), patch.object(Tuning, "programs", lambda s, d: 132 * s.per_sm):
    for dim, group, dtype, page, rows in (
        (32, 4, torch.bfloat16, None, 1), (24, 7, torch.bfloat16, 16, 3), (128, 16, torch.float32, 64, 1),
        (16, 1, torch.float16, None, 1), (256, 8, torch.bfloat16, None, 1),
    ):
        kv = random_kv([300, 256], heads=2, dim=dim, page=page, dtype=dtype)
        seq, pos = torch.arange(2).repeat_interleave(rows), (200 + torch.arange(rows)).repeat(2)
        runs = (RowRange(rows, 0), RowRange(rows, 1))
        given = Rows(torch.zeros(2 * rows, 2 * group, dim, dtype=dtype), seq, pos, runs)
        sink = torch.zeros(2 * group) if page else None
        with compiling(kernels, "pool_pieces") as pool, compiling(triton_kernels, "attend_pieces") as pieces:
            kernel.score_and_pool(given, kv, scale=1.0, softcap=None, sink_logit=sink)
        found[f"{dim} {group} {dtype} {page}"] = [[m.metadata.shared, "cubin" in m.asm] for m in pieces + pool]
print(json.dumps(found))
"""


def test_compiles_for_an_h200() -> None:
    cases = printed(COMPILE)
    assert len(cases) == 5
    for case, made in cases.items():
        assert len(made) == 2 and all(shared <= 232_448 and cubin for shared, cubin in made), (case, made)
