"""pooled_scores' Triton kernel over kept logits: on a GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import KVView, Rows, Spans, pooled_scores, score_keys
from longreach.ops.pooled_scores import resolve
from longreach.ops.pooled_scores import triton as kernel
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import exact_attend, exact_logits, exact_pooled_scores
from longreach.testing.tolerance import pooled_bound, unit_roundoff, within
from tests.ops.attend.kept import HALF_STEP, gaps
from tests.ops.attend.kernels import HALF, HARDWARE, PLACE, here, here_all, needs_gpu
from tests.ops.attend.test_triton import halved
from tests.ops.cases import make_case
from tests.tiers import swept


def check(
    rows: Rows, kv: KVView, *, impl: str = "triton", scale: float = 0.3, tiles: int | None = None, **more: Any
) -> None:
    """The scores made of what score_keys (by `impl`) kept, against the oracle's; K and V are gone by then.

    tiles: rows are summed by tile, drawn at random.
    """
    tile = None if tiles is None else torch.randint(tiles, rows.seq.shape, dtype=rows.seq.dtype)
    of = {} if tile is None else {"tile": tile, "tiles": tiles}
    softcap = more.get("softcap")
    lse, kept = score_keys(here(rows), here(kv), scale=scale, **here_all(more), impl=impl)
    blind = replace(kv, k=torch.full_like(kv.k, torch.nan), v=torch.full_like(kv.v, torch.nan))
    given = {name: x.to(PLACE) if isinstance(x, torch.Tensor) else x for name, x in of.items()}
    got = (
        pooled_scores(here(rows), here(blind), scale=scale, lse=lse, logits=kept, **given, impl="triton").double().cpu()
    )
    sunk = exact_attend(rows, kv, Spans.dense(), scale=scale, **more)
    want = exact_pooled_scores(rows, kv, scale=scale, softcap=softcap, lse=sunk.lse, **of)
    bound = pooled_bound(want, sunk, HARDWARE * unit_roundoff(torch.float32))
    if kept.top is not None:
        exact = exact_logits(rows, kv, scale=scale, softcap=softcap)
        p = torch.exp(exact - sunk.lse.nan_to_num(neginf=0.0).unflatten(1, (kv.heads, -1))[:, :, None])
        extra = 1.1 * HALF_STEP * (p * gaps(exact)).sum(-1)
        if tile is not None and tiles is not None:
            extra = extra.new_zeros(tiles, *extra.shape[1:]).index_add_(0, tile.long(), extra)
        bound = bound + extra
    if tile is not None:  # every slot has a score, 0 where nothing is seen
        within("scores", got, want, bound)
        assert not bool(got[want == 0].any())
        return
    limit = kv.seq_lens[rows.seq] if kv.slot_pos is not None else torch.minimum(kv.seq_lens[rows.seq], rows.pos + 1)
    reached = (torch.arange(kv.capacity) < limit[:, None, None]).expand_as(want)
    within("scores", got[reached], want[reached], bound[reached])
    assert not bool(got[reached & (want == 0)].any())


@pytest.mark.parametrize("seed", swept(range(30), 6))
def test_any_case(seed: int) -> None:
    case = make_case(seed)
    if case.rows.q.dtype == torch.bfloat16 and PLACE == "cpu":
        case = replace(case, rows=replace(case.rows, q=case.rows.q.half()), kv=halved(case.kv))
    for impl in ("triton", "reference"):  # either's logits will do
        check(case.rows, case.kv, impl=impl, **case.logits)
    for tiles in (1, 3):
        check(case.rows, case.kv, tiles=tiles, **case.logits)


@pytest.mark.covering
@pytest.mark.parametrize("group", swept([3, 4, 16, 1, 2, 7, 8], 3))
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_groups(group: int, dtype: torch.dtype) -> None:
    kv = random_kv([150, 0, 67], heads=2, dim=32, page=16, dtype=dtype)
    check(random_rows(kv, 5, group=group), kv)
    check(random_rows(kv, 19, group=group), kv, tiles=2)  # more rows than a round has


def test_a_large_group() -> None:
    kv = random_kv([40, 21], heads=1, dim=16, page=16, dtype=HALF)
    check(random_rows(kv, 2, group=128), kv)
    check(random_rows(kv, 3, group=48), kv, tiles=2)


@pytest.mark.parametrize(("chunk", "shares"), [(64, 1), (64, 3), (128, 64)])
def test_however_slots_are_shared_out(chunk: int, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = kernel.Tuning(chunk, 1, shares)
    monkeypatch.setattr(kernel, "Tuning", lambda **_: given)
    kv = random_kv([300, 5, 64], heads=2, dim=16, dtype=HALF)
    rows = random_rows(kv, 4)
    check(replace(rows, seq=torch.arange(3).repeat(2)[:4], pos=torch.tensor([299, 4, 63, 77])), kv)


def test_what_the_kernel_cannot_do_is_refused() -> None:
    kv = here(random_kv([9], heads=1, dim=16))
    rows = here(random_rows(random_kv([9], heads=1, dim=16), 2))
    lse, kept = score_keys(rows, kv, scale=0.3, impl="triton")
    with pytest.raises(Unsupported, match="give the logits and the lse of score_keys, or use impl='reference'"):
        pooled_scores(rows, kv, scale=0.3, impl="triton")
    with pytest.raises(Unsupported, match="no backward pass"):
        pooled_scores(rows, kv, scale=0.3, lse=lse.requires_grad_(), logits=kept, impl="triton")


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_kv([5], heads=1, dim=16)
    rows = random_rows(kv, 1)
    lse, kept = score_keys(rows, kv, scale=1.0)
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    with pytest.raises(Unsupported, match="runs on CUDA devices, got cpu"):
        pooled_scores(rows, kv, scale=1.0, lse=lse, logits=kept, impl="triton")


@needs_gpu
@pytest.mark.gpu
def test_auto_on_a_gpu() -> None:
    kv = here(random_kv([9], heads=1, dim=16))
    rows = here(random_rows(random_kv([9], heads=1, dim=16), 2))
    _, kept = score_keys(rows, kv, scale=0.3)
    assert resolve("auto", rows, logits=kept) == "triton"
    assert resolve("auto", rows) == "reference"
