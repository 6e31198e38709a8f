"""Dense prefill through torch's own kernels, on a GPU and on a CPU; what they cannot do is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import KVView, Partial, RowRange, Rows, Spans, attend
from longreach.ops import impl as impl_module
from longreach.ops.attend import resolve, sdpa
from longreach.ops.attend.triton_join import join
from longreach.ops.partial import merge
from longreach.testing.inputs import random_kv, random_rows
from tests.ops.attend.kernels import HALF, PLACE, here, needs_gpu


@pytest.mark.parametrize("impl", ["sdpa_cudnn", "sdpa_flash"])
def test_a_cpu_is_refused(impl: str) -> None:
    kv = random_kv([5], heads=1, dim=16)
    with pytest.raises(Unsupported, match=rf"{impl} takes bf16 and fp16 on CUDA devices, got float32.*impl='triton'"):
        attend(random_rows(kv, 1), kv, Spans.dense(), scale=1.0, impl=impl)


def prompt_rows(first: int, dtype: torch.dtype, page: int | None, heads: int = 8) -> tuple[Rows, KVView]:
    """Two sequences of 300 and 411 new rows after `first` cached ones; 2 KV heads."""
    kv = random_kv([first + 300, first + 411], heads=2, dim=64, page=page, dtype=dtype)
    seq = torch.arange(2).repeat_interleave(torch.tensor([300, 411]))
    pos = torch.cat([first + torch.arange(n) for n in (300, 411)])
    q = torch.randn(711, heads, 64).to(dtype)
    return Rows(q, seq, pos, (RowRange(300, 0, first), RowRange(411, 1, first))), kv


def in_fp64(rows: Rows, kv: KVView) -> Partial:
    wide = replace(rows, q=rows.q.double()), replace(kv, k=kv.k.double(), v=kv.v.double())
    return attend(*wide, Spans.dense(), scale=0.125, impl="reference")


@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize("first", [0, 333])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [2, 8])
def test_on_a_cpu_it_agrees_with_fp64(first: int, page: int | None, dtype: torch.dtype, heads: int) -> None:
    rows, kv = prompt_rows(first, dtype, page, heads)
    want, got = in_fp64(rows, kv), attend(rows, kv, Spans.dense(), scale=0.125, impl="sdpa_cpu")
    assert got.out.dtype == got.lse.dtype == torch.float32
    rounded = (want.out.to(dtype).double() - want.out).abs().max()
    assert float((got.out.double() - want.out).abs().max()) <= 2 * rounded + 1e-5
    torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-5, atol=1e-4)


def test_auto_on_a_cpu() -> None:
    """torch's kernel for dense prefill of long prompts and their chunks; the reference for all else."""
    for first in (0, 333):
        rows, kv = prompt_rows(first, torch.float32, None)
        assert resolve("auto", rows, kv, Spans.dense()) == "sdpa_cpu"
        assert resolve("reference", rows, kv, Spans.dense()) == "reference"
        others = (
            ((replace(rows, runs=None), kv, Spans.dense()), {}),
            ((rows, kv, Spans.window(400)), {}),
            ((rows, kv, Spans.dense()), {"softcap": 2.0}),
            ((rows, kv, Spans.dense()), {"sink_logit": torch.zeros(8)}),
            ((replace(rows, q=rows.q.double()), replace(kv, k=kv.k.double(), v=kv.v.double()), Spans.dense()), {}),
        )
        for given, options in others:
            assert resolve("auto", *given, **options) == "reference"
        with torch.enable_grad():
            assert resolve("auto", replace(rows, q=rows.q.clone().requires_grad_()), kv, Spans.dense()) == "reference"
        with pytest.raises(Unsupported, match=r"sdpa_cpu attends to everything.*impl='reference'"):
            attend(rows, kv, Spans.window(400), scale=1.0, impl="sdpa_cpu")
    short = random_kv([200], heads=1, dim=16)
    rows = Rows(torch.randn(200, 2, 16), torch.zeros(200).long(), torch.arange(200), (RowRange(200, 0, 0),))
    assert resolve("auto", rows, short, Spans.dense()) == "reference"


def decode_rows(lengths: list[int], dtype: torch.dtype, page: int | None = None, heads: int = 8) -> tuple[Rows, KVView]:
    """The last token of each sequence; 2 KV heads, memory of poison where no key lies."""
    kv = random_kv(lengths, heads=2, dim=64, page=page, dtype=dtype)
    pos = torch.tensor(lengths) - 1
    runs = tuple(RowRange(1, b, n - 1) for b, n in enumerate(lengths))
    return Rows(torch.randn(len(lengths), heads, 64).to(dtype), torch.arange(len(lengths)), pos, runs), kv


@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize("lengths", [[1], [333], [5, 41, 700]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 8])
def test_one_row_of_each_sequence(lengths: list[int], page: int | None, dtype: torch.dtype, heads: int) -> None:
    rows, kv = decode_rows(lengths, dtype, page, heads)
    want, got = in_fp64(rows, kv), attend(rows, kv, Spans.dense(), scale=0.125, impl="sdpa_cpu")
    rounded = (want.out.to(dtype).double() - want.out).abs().max()
    assert float((got.out.double() - want.out).abs().max()) <= 2 * rounded + 1e-5
    torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-5, atol=1e-4)


def test_auto_decodes_short_contexts_on_a_cpu() -> None:
    """Longer ones, more sequences and pages of several are Numba's."""
    pytest.importorskip("numba")
    longest = sdpa.SHORT // (2 * 2 * 64 * 4)
    for lengths, dtype, page, impl in (
        ([longest], torch.float32, None, "sdpa_cpu"),
        ([longest + 1], torch.float32, None, "numba"),
        ([longest + 1], torch.bfloat16, None, "sdpa_cpu"),
        ([90] * sdpa.FEW, torch.float32, None, "sdpa_cpu"),
        ([90] * (sdpa.FEW + 1), torch.float32, None, "numba"),
        ([90, 70], torch.float32, 64, "numba"),
        ([90], torch.float16, None, "numba"),
    ):
        rows, kv = decode_rows(lengths, dtype, page)
        assert resolve("auto", rows, kv, Spans.dense()) == impl, (lengths, dtype, page)
        assert resolve("auto", replace(rows, runs=None), kv, Spans.dense()) == "numba"
    rows, kv = decode_rows([90], torch.float32)
    assert resolve("auto", rows, kv, Spans.window(40)) == "numba"
    assert resolve("auto", rows, kv, Spans.dense(), softcap=2.0) == "numba"


def test_auto_without_numba_decodes_all_lengths_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impl_module, "_installed", lambda package: False)
    for count in (1, sdpa.FEW + 1):
        rows, kv = decode_rows([sdpa.SHORT // (2 * 2 * 64 * 4) + 1] * count, torch.float32)
        assert resolve("auto", rows, kv, Spans.dense()) == "sdpa_cpu"
        assert resolve("auto", rows, kv, Spans.window(40)) == "reference"


@pytest.mark.parametrize("page", [None, 16, 64, 1000])
@pytest.mark.parametrize("first", [0, 7])
def test_runs_find_their_keys(page: int | None, first: int) -> None:
    """The walk over runs and pages, with a plain function in the place of the GPU's kernel."""

    def triangle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows, keys = q.shape[2], k.shape[2]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        hidden = ~torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        logits = (0.25 * q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        return [(logits.softmax(-1) @ v, logits.logsumexp(-1))]

    kv = random_kv([first + 30, first + 41], heads=2, dim=16, page=page)
    seq = torch.arange(2).repeat_interleave(torch.tensor([30, 41]))
    pos = torch.cat([first + torch.arange(n) for n in (30, 41)])
    rows = Rows(torch.randn(71, 4, 16), seq, pos, (RowRange(30, 0, first), RowRange(41, 1, first)))
    want = attend(rows, kv, Spans.dense(), scale=0.25)
    got = sdpa._by_run(rows, kv, triangle)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize(
    ("impl", "first"), [("sdpa_cudnn", 0), ("sdpa_cudnn", 333), ("sdpa_flash", 0), ("sdpa_flash", 333)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_agrees_with_fp64(impl: str, first: int, page: int | None, dtype: torch.dtype) -> None:
    lengths = [first + 300, first + 411]
    kv = random_kv(lengths, heads=2, dim=64, page=page, dtype=dtype)
    seq = torch.arange(2).repeat_interleave(torch.tensor([300, 411]))
    pos = torch.cat([first + torch.arange(n) for n in (300, 411)])
    rows = Rows(torch.randn(711, 8, 64).to(dtype), seq, pos, (RowRange(300, 0, first), RowRange(411, 1, first)))
    want = attend(
        replace(rows, q=rows.q.double()), replace(kv, k=kv.k.double(), v=kv.v.double()), Spans.dense(), scale=0.125
    )
    got = attend(here(rows), here(kv), Spans.dense(), scale=0.125, impl=impl)
    torchs = (want.out.to(dtype).double() - want.out).abs().max()
    assert float((got.out.cpu().double() - want.out).abs().max()) <= 2 * torchs + 1e-5
    torch.testing.assert_close(got.lse.cpu().double(), want.lse, rtol=1e-5, atol=1e-4)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("first", [2, 7, 1000])
@pytest.mark.parametrize("capacity", [1500, 2048])
def test_unwritten_slots_of_one_page_hold_nan(first: int, capacity: int) -> None:
    """Memory of one page a sequence is read where it lies; what is behind the last token is not read."""
    kv = random_kv([first + 411], heads=2, dim=128, dtype=HALF)
    wide = torch.full((2, 1, 2, capacity, 128), torch.nan, dtype=HALF)
    wide[0, :, :, : kv.k.shape[2]], wide[1, :, :, : kv.k.shape[2]] = kv.k, kv.v
    runs = (RowRange(411, 0, first),)
    rows = Rows(torch.randn(411, 8, 128).to(HALF), torch.zeros(411).long(), first + torch.arange(411), runs)
    want = in_fp64(rows, kv)
    for impl in ("sdpa_cudnn", "sdpa_flash"):
        got = attend(here(rows), here(replace(kv, k=wide[0], v=wide[1])), Spans.dense(), scale=0.125, impl=impl)
        torchs = (want.out.to(HALF).double() - want.out).abs().max()
        assert float((got.out.cpu().double() - want.out).abs().max()) <= 2 * torchs + 1e-5
        torch.testing.assert_close(got.lse.cpu().double(), want.lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("heads", "dim", "dtype"), [(4, 16, HALF), (6, 80, torch.float32), (1, 128, HALF)])
def test_a_chunk_and_the_tokens_before_it_are_joined(heads: int, dim: int, dtype: torch.dtype) -> None:
    """In memory as cuDNN leaves it: heads or tokens first, more lse than rows."""
    outs = torch.randn(1, 7, heads, dim, dtype=dtype).transpose(1, 2), torch.randn(1, heads, 7, dim, dtype=dtype)
    lses = [30 * torch.randn(1, heads, 9) for _ in range(2)]
    parts = [(here(o), here(x)[..., :7]) for o, x in zip(outs, lses, strict=True)]
    out, lse = torch.full((7, heads, dim), torch.nan), torch.full((7, heads), torch.nan)
    out, lse = here(out), here(lse)
    join(*parts, out, lse)
    a, b = (Partial(o[0].transpose(0, 1).double(), x[0].T.double()) for o, x in parts)
    want = merge(a, b)
    torch.testing.assert_close(out.double(), want.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want.lse, rtol=1e-5, atol=1e-5)


@needs_gpu
@pytest.mark.gpu
def test_what_they_cannot_do_is_refused() -> None:
    kv: KVView = here(random_kv([300], heads=1, dim=64, dtype=torch.bfloat16))
    q = torch.randn(300, 2, 64, device=PLACE, dtype=torch.bfloat16)
    rows = Rows(q, torch.zeros(300, device=PLACE).long(), torch.arange(300, device=PLACE), (RowRange(300, 0, 0),))
    for changed, selection, message in (
        (replace(rows, runs=None), Spans.dense(), "Rows.runs"),
        (rows, Spans.window(9), "must be Spans.dense"),
    ):
        with pytest.raises(Unsupported, match=message):
            attend(changed, kv, selection, scale=1.0, impl="sdpa_cudnn")
    after_one = replace(rows, runs=(RowRange(300, 0, 1),))
    with pytest.raises(Unsupported, match="no single key"):
        attend(after_one, kv, Spans.dense(), scale=1.0, impl="sdpa_cudnn")
    with pytest.raises(Unsupported, match="no softcap"):
        attend(rows, kv, Spans.dense(), scale=1.0, softcap=2.0, impl="sdpa_flash")
