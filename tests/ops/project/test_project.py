"""project, reference and Triton, against fp64 products in plain loops; Loki's scores as keys of another width."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.ops import KVView, Rows, Spans, score_keys
from longreach.ops.project import pad_basis, project, project_keys, triton
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import exact_attend
from longreach.testing.tolerance import bounds, unit_roundoff, within
from tests.ops.attend.kernels import HALF, HARDWARE, PLACE, here, needs_gpu

impls = pytest.mark.parametrize("impl", ["reference", "triton"])


def place_of(kv: KVView, seq: int, slot: int) -> tuple[int, int]:
    page = seq if kv.block_table is None else int(kv.block_table[seq, slot // kv.page])
    return page, slot % kv.page


def product(x: Tensor, basis: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [D] times basis [D, width] in fp64, and the bound on its error: fp32 sums, then one rounding to dtype."""
    terms = x.double()[:, None] * basis.double()
    want = terms.sum(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    error = HARDWARE * unit_roundoff(wide) * (x.shape[0] + 1) * terms.abs().sum(0)
    tiny = torch.finfo(dtype).smallest_normal * unit_roundoff(dtype) * 2
    return want, error + unit_roundoff(dtype) * (want.abs() + error) + tiny


def memory_for(kv: KVView, width: int, packed: bool) -> Tensor:
    """Coordinates that nobody has written: NaN. packed: a slice of a larger tensor."""
    out = torch.full((*kv.k.shape[:3], width + 8 * packed), torch.nan, dtype=kv.k.dtype)
    return out[..., :width]


def check(rows: Rows, kv: KVView, width: int, impl: str, slot: Tensor | None = None, packed: bool = False) -> None:
    basis = torch.randn(kv.heads, kv.k.shape[3], width).to(kv.k.dtype)
    before = memory_for(kv, width, packed)
    given = here(rows), here(kv), here(basis)
    place = None if slot is None else here(slot)
    out, alone = here(before.clone()), here(before.clone())
    got = project(*given, out, slot=place, impl=impl)
    project_keys(*given, alone, slot=place, impl=impl)
    if PLACE != "cpu":  # the interpreter's products add in an order that depends on their number
        torch.testing.assert_close(out, alone, rtol=0, atol=0, equal_nan=True)
    out, alone, got = (x.double().cpu() for x in (out, alone, got))
    assert got.shape == (*rows.q.shape[:2], width)
    untouched = torch.ones(before.shape[:3], dtype=torch.bool)
    slots = rows.pos if slot is None else slot
    for r, (seq, n) in enumerate(zip(rows.seq.tolist(), slots.tolist(), strict=True)):
        for h in range(rows.q.shape[1]):
            want, error = product(rows.q[r, h], basis[h // kv.group(rows)], kv.k.dtype)
            within("queries", got[r, h], want, error)
        if not 0 <= n < int(kv.seq_lens[seq]):
            continue
        page, offset = place_of(kv, seq, n)
        untouched[page, :, offset] = False
        for g in range(kv.heads):
            want, error = product(kv.k[page, g, offset], basis[g], kv.k.dtype)
            for found in (out, alone):
                within("keys", found[page, g, offset], want, error)
    assert bool(out[untouched].isnan().all()) and bool(alone[untouched].isnan().all())


@impls
@pytest.mark.parametrize("seed", range(16))
def test_any_case(impl: str, seed: int) -> None:
    dice = random.Random(seed)
    kv = random_kv(
        [dice.choice((0, 1, 7, 31, 40)) for _ in range(dice.choice((1, 3)))],
        heads=dice.choice((1, 2, 3)), dim=dice.choice((8, 16, 24, 40)), page=dice.choice((None, 1, 3, 16)),
        memory=dice.choice(("plain", "packed", "tokens")), evicted=dice.random() < 0.3,
        dtype=dice.choice((HALF, torch.float32)), ints=dice.choice((torch.int32, torch.int64)), seed=seed,
    )  # fmt: skip
    rows = random_rows(kv, dice.choice((0, 1, 2, 5, 20)), group=dice.choice((1, 2, 3, 4, 7, 16)), seed=seed)
    slot = None
    if kv.slot_pos is not None or dice.random() < 0.3:
        slot = (torch.rand(rows.pos.shape) * (kv.seq_lens[rows.seq.long()] + 3)).to(kv.seq_lens.dtype) - 1
    check(rows, kv, dice.choice((1, 2, 5, 8, 24)), impl, slot, dice.random() < 0.5)


@impls
@pytest.mark.parametrize(("dim", "width"), [(64, 16), (128, 32), (128, 100), (256, 128), (136, 136)])
def test_head_dims_and_widths(impl: str, dim: int, width: int) -> None:
    for dtype, group in ((HALF, 4), (torch.float32, 5)):
        kv = random_kv([20, 7], heads=2, dim=dim, page=16, dtype=dtype)
        rows = replace(random_rows(kv, 2, group=group), seq=torch.arange(2), pos=kv.seq_lens - 1)
        check(rows, kv, width, impl)


def test_large_groups_of_wide_heads_are_projected_in_parts() -> None:
    kv = random_kv([20, 7], heads=2, dim=264, page=16, dtype=HALF)
    rows = replace(random_rows(kv, 2, group=24), seq=torch.arange(2), pos=kv.seq_lens - 1)
    check(rows, kv, 8, "triton")


@impls
def test_a_prompt(impl: str) -> None:
    kv = random_kv([130, 3], heads=2, dim=16, page=16, dtype=HALF)
    seq = torch.zeros(130, dtype=torch.int64)
    check(Rows(torch.randn(130, 4, 16).to(HALF), seq, torch.randperm(130)), kv, 8, impl)


def test_fp64_in_the_reference() -> None:
    kv = random_kv([20], heads=2, dim=16, dtype=torch.float64)
    check(random_rows(kv, 3), kv, 8, "reference")


@impls
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("rank", [3, 8, 20])
def test_coordinates_are_scored_like_keys(impl: str, page: int | None, rank: int) -> None:
    """Lse by coordinates over padded columns: that of the exact products of the coordinates."""
    kv = random_kv([60, 31], heads=2, dim=32, page=page, dtype=HALF)
    basis = pad_basis(torch.linalg.qr(torch.randn(2, 32, 32)).Q[..., :rank].to(HALF))
    assert basis.shape == (2, 32, -(-rank // 8) * 8) and not basis[..., rank:].any()
    seq = torch.cat([torch.zeros(60), torch.ones(31)]).long()
    prompt = Rows(torch.zeros(91, 4, 32).to(HALF), seq, torch.cat([torch.arange(60), torch.arange(31)]))
    out = here(memory_for(kv, basis.shape[2], False))
    project_keys(here(prompt), here(kv), here(basis), out, impl=impl)
    rows = Rows(torch.randn(2, 4, 32).to(HALF), torch.arange(2), kv.seq_lens - 1)
    q = project(here(rows), here(kv), here(basis), out, impl=impl).cpu()
    few = Rows(q, rows.seq, rows.pos)
    view = KVView(out.cpu(), out.cpu(), kv.seq_lens, kv.block_table)
    terms: dict[str, Any] = {"scale": 32**-0.5, "softcap": 20.0, "sink_logit": torch.randn(4)}
    lse, _ = score_keys(here(few), here(view), **{k: here(x) for k, x in terms.items()}, impl=impl)
    want = exact_attend(few, replace(view, v=torch.zeros_like(view.v)), Spans.dense(), **terms)
    within("lse", lse.double().cpu(), want.lse, bounds(want, HARDWARE * unit_roundoff(torch.float32))[1])


def wrong_calls() -> list[tuple[dict[str, Any], str]]:
    kv = random_kv([9, 3], heads=2, dim=8, page=4)
    rows, basis, out = random_rows(kv, 3), torch.zeros(2, 8, 4), torch.zeros(*kv.k.shape[:3], 4)
    given = {"rows": rows, "kv": kv, "basis": basis, "out": out}
    evicted = random_kv([9, 3], heads=2, dim=8, page=4, evicted=True)
    return [
        (given | {"basis": basis[:1]}, r"basis: expected torch.float32 \[G=2, D=8, width >= 1\] on cpu, got"),
        (given | {"basis": basis.half()}, "basis: .* got float16"),
        (given | {"basis": basis[..., :0]}, "basis: .* got"),
        (given | {"out": out[..., :3]}, r"out: expected torch.float32 \[7, 2, 4, 4\] on cpu, got"),
        (given | {"out": out.double()}, "out: .* got float64"),
        (given | {"basis": torch.zeros(2, 4, 8).transpose(1, 2)}, "basis, out: expected a contiguous last dimension"),
        (given | {"slot": torch.zeros(2).long()}, r"slot: expected int \[R=3\] on cpu, got int64\[2\]"),
        (given | {"kv": evicted}, "slot: expected the rows' slots, as slots are not positions"),
        (given | {"rows": None}, "rows: expected Rows, got NoneType"),
    ]


@pytest.mark.parametrize("number", range(len(wrong_calls())))
def test_what_does_not_fit_is_refused(number: int) -> None:
    given, message = wrong_calls()[number]
    for op in (project, project_keys):
        with pytest.raises(InvalidInput, match=message):
            op(**given)


def test_what_the_kernel_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"basis: expected float \[G, D, rank >= 1\], got float32\[2, 2\]"):
        pad_basis(torch.zeros(2, 2))
    kv = random_kv([9], heads=2, dim=8)
    rows, basis, out = random_rows(kv, 1), torch.zeros(2, 8, 4), torch.zeros(*kv.k.shape[:3], 4)
    with pytest.raises(UnknownName, match="unknown impl of project 'fast'; known: auto, reference, triton"):
        project(rows, kv, basis, out, impl="fast")
    double = random_kv([9], heads=2, dim=8, dtype=torch.float64)
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        project(random_rows(double, 1), double, basis.double(), out.double(), impl="triton")
    with pytest.raises(Unsupported, match="no backward pass"):
        project(rows, kv, basis.clone().requires_grad_(), out, impl="triton")
    monkeypatch.setattr(triton, "INTERPRETED", False)
    with pytest.raises(Unsupported, match="runs on CUDA devices, got cpu"):
        project(rows, kv, basis, out, impl="triton")


@needs_gpu
@pytest.mark.gpu
def test_a_captured_graph_follows_slots() -> None:
    kv = here(random_kv([60, 9], heads=2, dim=64, page=16, dtype=HALF))
    rows = Rows(*(x.to(kv.k.device) for x in (torch.randn(2, 8, 64).to(HALF), torch.arange(2), torch.tensor([3, 3]))))
    basis = here(torch.randn(2, 64, 16).to(HALF))
    out = torch.full((*kv.k.shape[:3], 16), torch.nan, dtype=HALF, device=kv.k.device)
    project(rows, kv, basis, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        project(rows, kv, basis, out)
    for slots in ((59, 0), (17, 8)):
        rows.pos.copy_(torch.tensor(slots))
        graph.replay()
        for b, n in enumerate(slots):
            page, offset = place_of(kv, b, n)
            assert bool(out[page, :, offset].isfinite().all())
