"""Scoring keys: how they are made, and what scoring by them gives, in the reference and in Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName
from longreach.ops import KVView, RowRange, Rows, ScoringKeys, Spans, copy_keys, quantise_keys, score_keys
from longreach.ops.attend import triton as kernels
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.oracle import exact_attend, exact_logits
from longreach.testing.tolerance import bounds, logits_bound, within
from tests.ops.attend.kept import HALF_STEP, gaps, unit
from tests.ops.attend.kernels import HALF, PLACE, here, here_all, needs_gpu
from tests.ops.compiler import printed
from tests.tiers import swept

IMPLS = ("reference", "triton")


def coded(kv: KVView) -> ScoringKeys:
    codes, scale = quantise_keys(kv.k)
    return ScoringKeys(codes, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_each_channel_is_off_by_half_a_step(dtype: torch.dtype, size: float) -> None:
    k = (size * torch.randn(3, 2, 50, 64)).to(dtype)
    codes, scale = quantise_keys(k)
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (3, 2, 50)
    again = codes.double() * scale[..., None].double()
    assert bool(((again - k.double()).abs() <= scale[..., None] * (0.5 + 1e-4)).all())
    assert torch.equal(codes.abs().amax(-1), torch.full((3, 2, 50), 127, dtype=torch.int8))  # no range is left unused
    worst = k.double().abs().amax(-1, keepdim=True) / 254
    assert bool(((again - k.double()).abs() <= worst * 1.001).all())


@pytest.mark.covering
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("memory", "page"), [("plain", None), ("plain", 7), ("packed", 7), ("tokens", 7)])
@pytest.mark.parametrize(("heads", "dim", "dtype"), [(3, 24, torch.float32), (2, 16, HALF)])
def test_keys_of_some_rows_are_copied_and_nothing_else(
    impl: str, memory: Any, page: int | None, heads: int, dim: int, dtype: torch.dtype
) -> None:
    kv = random_kv([40, 9, 31], heads=heads, dim=dim, page=page, memory=memory, dtype=dtype)
    seq, pos = torch.tensor([2, 0, 0, 1, 2]), torch.tensor([30, 39, 12, 0, 6])
    rows = Rows(torch.full((5, heads, dim), torch.nan, dtype=dtype), seq, pos)
    place, offset = kv.locate(seq, pos)
    kv.k[place[1], 0, offset[1]] = 0.0
    want, scale = torch.full(kv.k.shape, 99, dtype=torch.int8), torch.full(kv.k.shape[:3], 99.0)
    got = here(ScoringKeys(want.clone(), scale.clone()))
    for r in range(5):
        want[place[r], :, offset[r]], scale[place[r], :, offset[r]] = quantise_keys(kv.k[place[r], :, offset[r]])
    copy_keys(here(rows).seq, here(rows).pos, here(kv), got, impl=impl)
    assert torch.equal(got.k.cpu(), want) and torch.equal(got.scale.cpu(), scale)


COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops import Rows, ScoringKeys
from longreach.ops.attend import triton_quantise, triton_quantise_kernels
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv

with compiling(triton_quantise_kernels, "copy_rows") as made:
    for page, dtype in ((None, torch.bfloat16), (16, torch.float32)):
        kv = random_kv([256, 256], heads=8, dim=128, page=page, dtype=dtype)
        rows = Rows(torch.zeros(2, 32, 128, dtype=dtype), torch.arange(2), torch.full((2,), 255))
        keys = ScoringKeys(torch.zeros(kv.k.shape, dtype=torch.int8), torch.zeros(kv.k.shape[:3]))
        with patch.object(torch.Tensor, "device", property(lambda self: torch.device("cuda", 0))):
            triton_quantise.copy_keys(rows.seq, rows.pos, kv, keys)
print(json.dumps([[m.metadata.name, "cubin" in m.asm, "griddepcontrol.wait" in m.asm["ptx"]] for m in made]))
"""


def test_the_copy_compiles_for_an_h200() -> None:
    assert printed(COMPILE) == [["copy_rows", True, True]] * 2


def test_copies_that_do_not_fit_are_refused() -> None:
    kv = random_kv([9], heads=2, dim=16)
    rows = Rows(torch.zeros(1, 2, 16), torch.tensor([0]), torch.tensor([3]))
    codes, scale = quantise_keys(kv.k)
    with pytest.raises(InvalidInput, match="keys: expected an 8-bit copy laid out like float32"):
        copy_keys(rows.seq, rows.pos, kv, ScoringKeys(codes[:, :1], scale[:, :1]))
    with pytest.raises(UnknownName, match="copy_keys"):
        copy_keys(rows.seq, rows.pos, kv, ScoringKeys(codes, scale), impl="cuda")


def test_keys_of_zeros_and_keys_that_differ_in_size() -> None:
    k = torch.zeros(3, 8)
    k[1], k[2] = torch.arange(8) * 1e-20, torch.arange(8) * 1e20
    codes, scale = quantise_keys(k)
    assert scale[0] == 0 and not codes[0].any()
    torch.testing.assert_close(codes[1:].double() * scale[1:, None].double(), k[1:].double(), rtol=0.1, atol=0.0)


def check(rows: Rows, kv: KVView, *, impl: str, **logits: Any) -> None:
    """Against the oracle over the keys that the codes stand for; the view's own keys are gone."""
    logits = {"scale": rows.q.shape[2] ** -0.5, **logits}
    keys = coded(replace(kv, k=kv.k.nan_to_num(1.0)))
    blind = replace(kv, k=torch.full_like(kv.k, torch.nan), v=torch.full_like(kv.v, torch.nan))
    lse, kept = score_keys(here(rows), here(blind), **here_all(logits), keys=here(keys), impl=impl)
    meant = replace(kv, k=keys.k.double() * keys.scale.double()[..., None], v=torch.zeros(kv.v.shape).double())
    precise = replace(rows, q=rows.q.double())
    shape = {k: v for k, v in logits.items() if k != "sink_logit"}
    exact, bare = exact_logits(precise, meant, **shape), exact_attend(precise, meant, Spans.dense(), **shape)
    # one rounding more of each product (code times scale), and q in steps of its largest channel over 32258
    u = unit(impl, torch.float32)
    off = 2 * logits_bound(bare, u) + abs(logits["scale"]) * half_steps(precise, meant) * (impl == "triton")
    sunk = exact_attend(precise, meant, Spans.dense(), **logits)
    got, some = lse.double().cpu(), sunk.lse > -torch.inf
    assert torch.equal(got > -torch.inf, some)
    within("lse", got[some], sunk.lse[some], (2 * bounds(sunk, u)[1] + off)[some])
    bound = off.unflatten(1, (kv.heads, -1))[:, :, None].expand_as(exact)
    if kept.top is not None:
        bound = bound + HALF_STEP * gaps(exact) + u * max(bare.logit.flatten().tolist(), default=0.0)
    seen = exact > -torch.inf
    within("logits", kept.natural(kv.capacity).double().cpu()[seen], exact[seen], bound[seen])


def half_steps(rows: Rows, kv: KVView) -> Tensor:
    """Half a step of q times the largest sum |k|: [R, H]."""
    step = rows.q.abs().amax(-1) / 32258
    return 0.5 * step * kv.k.nan_to_num(0.0).abs().sum(-1).max()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("group", "page", "dtype"),
    swept([(4, 5, HALF), (7, 16, HALF), (4, None, torch.float32), (1, None, HALF), (8, 1, HALF), (16, 64, HALF)], 2),
)
def test_groups_and_pages(impl: str, group: int, page: int | None, dtype: torch.dtype) -> None:
    kv = random_kv([75, 0, 33], heads=2, dim=32, page=page, dtype=dtype)
    rows = random_rows(kv, 4, group=group)
    check(rows, kv, impl=impl)
    check(rows, kv, impl=impl, softcap=2.0, sink_logit=torch.randn(2 * group))


@pytest.mark.parametrize("dim", swept([40, 64, 8, 80, 128, 256], 2))
@pytest.mark.parametrize("impl", IMPLS)
def test_head_dims(impl: str, dim: int) -> None:
    kv = random_kv([75, 33], heads=2, dim=dim, dtype=HALF, memory="packed", page=16)
    check(random_rows(kv, 3, group=4), kv, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_evicted_views_and_several_rows_a_sequence(impl: str) -> None:
    kv = random_kv([40, 33], heads=2, dim=32, page=8, dtype=HALF, evicted=True)
    check(random_rows(kv, 5, group=2), kv, impl=impl)
    kv = random_kv([40, 33], heads=2, dim=32, dtype=HALF)
    seq, pos = torch.arange(2).repeat_interleave(6), torch.cat([34 + torch.arange(6), 27 + torch.arange(6)])
    rows = Rows(torch.randn(12, 6, 32).to(HALF), seq, pos, (RowRange(6, 0), RowRange(6, 1)))
    check(rows, kv, impl=impl)


@pytest.mark.parametrize(("programs", "block"), swept([(5, 32), (1, 16), (40, 16)], 1))
def test_however_work_is_dealt_out(programs: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuning, "programs", lambda self, device: programs)
    given = Tuning(block, 4, 2, 1, unit=block, chained=PLACE == "cuda")
    monkeypatch.setattr(kernels, "keeping_tuning", lambda *_, **__: given)
    for page in (None, 4):
        kv = random_kv([5, 0, 150, 64], heads=2, dim=32, dtype=HALF, page=page)
        rows = random_rows(kv, 4)
        check(replace(rows, seq=torch.arange(4), pos=torch.tensor([4, 0, 149, 63])), kv, impl="triton")


@pytest.mark.parametrize("impl", IMPLS)
def test_queries_of_zeros(impl: str) -> None:
    kv = random_kv([20], heads=1, dim=32, dtype=HALF)
    rows = replace(random_rows(kv, 2), q=torch.zeros(2, 2, 32).to(HALF), pos=torch.tensor([19, 7]))
    lse, kept = score_keys(here(rows), here(kv), scale=1.0, keys=here(coded(kv)), impl=impl)
    torch.testing.assert_close(lse.cpu(), torch.tensor([20.0, 8.0]).log()[:, None].expand(2, 2))
    assert not bool(kept.natural(8)[:, :, :8].any())


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_chosen_by_8_bits_holds_the_mass(impl: str) -> None:
    """Of the exact best tenth's mass at least 0.995, on keys with a few large channels as rotated keys have them."""
    kv = random_kv([400], heads=2, dim=64, dtype=HALF)
    kv.k[..., :4] *= 4.0
    rows = replace(random_rows(kv, 3, group=4), seq=torch.zeros(3).long(), pos=torch.tensor([399, 398, 397]))
    exact = exact_logits(rows, kv, scale=0.25)[:, :, :398]
    share = torch.softmax(exact, 2).sum(-1)
    _, kept = score_keys(here(rows), here(kv), scale=0.25, keys=here(coded(kv)), impl=impl)
    found = torch.softmax(kept.natural(398).double().cpu(), 2).sum(-1).topk(40, -1).indices
    mass, best = share.gather(-1, found).sum(-1), share.topk(40, -1).values.sum(-1)
    assert bool((mass >= 0.995 * best).all())


def test_keys_past_what_a_row_sees_are_not_read() -> None:
    kv = random_kv([60], heads=2, dim=32, page=8, dtype=HALF)
    rows = replace(random_rows(kv, 2), pos=torch.tensor([37, 20]))
    keys = coded(kv)
    want, _ = score_keys(here(rows), here(kv), scale=0.3, keys=here(keys), impl="triton")
    poison(replace(kv, k=keys.scale[..., None], v=keys.scale[..., None].clone()), 0, 0, range(38, 60))
    assert bool(keys.scale.isnan().any())
    got, _ = score_keys(here(rows), here(kv), scale=0.3, keys=here(keys), impl="triton")
    assert torch.equal(got, want)


K = torch.zeros(2, 3, 8, 16, dtype=torch.int8)
SCALE = torch.zeros(2, 3, 8)


@pytest.mark.parametrize(
    ("k", "scale", "message"),
    [
        (K.float(), SCALE, r"k: expected int8 \[P, G, page, D\], got float32"),
        (K[0], SCALE, r"k: expected int8 .* got int8\[3, 8, 16\]"),
        (K, SCALE.double(), r"scale: expected float32 \[2, 3, 8\] on cpu, got float64"),
        (K, SCALE[..., 0], r"scale: .* got float32\[2, 3\]"),
        (K, 1.0, "scale: .* got float"),
        (K.transpose(2, 3), SCALE.new_zeros(2, 3, 16), "last dimension must be contiguous"),
    ],
)
def test_scoring_keys_refuse(k: Tensor, scale: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ScoringKeys(k, scale)


def test_scoring_keys_of_another_view() -> None:
    kv = random_kv([9], heads=2, dim=16)
    rows = random_rows(kv, 2)
    with pytest.raises(
        InvalidInput, match=r"keys: expected the view's \[P, G, page, D\] = \[1, 2, 12, 16\] on cpu, got"
    ):
        score_keys(rows, kv, scale=1.0, keys=ScoringKeys(K, SCALE))
    wrong: Any = coded(kv).k
    with pytest.raises(InvalidInput, match="keys: expected ScoringKeys, got int8"):
        score_keys(rows, kv, scale=1.0, keys=wrong)
    with pytest.raises(InvalidInput, match="k: expected bf16, fp16, fp32 or fp64"):
        quantise_keys(wrong)


@needs_gpu
@pytest.mark.gpu
def test_long_contexts() -> None:
    lengths = [40_000, 3, 9_001]
    kv = random_kv(lengths, heads=2, dim=128, page=64, dtype=torch.bfloat16)
    rows = replace(random_rows(kv, 3, group=4), seq=torch.arange(3), pos=torch.tensor(lengths) - 1)
    keys = coded(replace(kv, k=kv.k.nan_to_num(0.0)))
    want_lse, want = score_keys(rows, kv, scale=0.088, keys=keys, impl="reference")
    lse, kept = score_keys(here(rows), here(kv), scale=0.088, keys=here(keys), impl="triton")
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-5, atol=1e-4)
    for r, n in enumerate(lengths):
        torch.testing.assert_close(kept.natural(n)[r].cpu(), want.natural(n)[r], rtol=1e-3, atol=2e-2)
