"""Dense prefill through torch's own kernels: on a GPU only; what they cannot do is refused anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import KVView, RowRange, Rows, Spans, attend
from longreach.ops.attend import resolve, sdpa
from longreach.testing.inputs import random_kv, random_rows
from tests.ops.attend.kernels import PLACE, here, needs_gpu


@pytest.mark.parametrize("impl", ["sdpa_cudnn", "sdpa_flash"])
def test_a_cpu_is_refused(impl: str) -> None:
    kv = random_kv([5], heads=1, dim=16)
    with pytest.raises(Unsupported, match=rf"{impl} takes bf16 and fp16 on CUDA devices, got float32.*impl='triton'"):
        attend(random_rows(kv, 1), kv, Spans.dense(), scale=1.0, impl=impl)


def test_auto_on_a_cpu_is_the_reference() -> None:
    kv = random_kv([300], heads=1, dim=16)
    rows = Rows(torch.randn(300, 2, 16), torch.zeros(300).long(), torch.arange(300), (RowRange(300, 0, 0),))
    assert resolve("auto", rows, kv, Spans.dense()) == "reference"


@pytest.mark.parametrize("page", [None, 16, 64, 1000])
@pytest.mark.parametrize("first", [0, 7])
def test_runs_find_their_keys(page: int | None, first: int) -> None:
    """The walk over runs and pages, with a plain function in the place of the GPU's kernel."""

    def triangle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, keys = q.shape[2], k.shape[2]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        hidden = ~torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        logits = (0.25 * q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        return logits.softmax(-1) @ v, logits.logsumexp(-1)

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
@pytest.mark.parametrize(("impl", "first"), [("sdpa_cudnn", 0), ("sdpa_flash", 0), ("sdpa_flash", 333)])
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
def test_what_they_cannot_do_is_refused() -> None:
    kv: KVView = here(random_kv([300], heads=1, dim=64, dtype=torch.bfloat16))
    q = torch.randn(300, 2, 64, device=PLACE, dtype=torch.bfloat16)
    rows = Rows(q, torch.zeros(300, device=PLACE).long(), torch.arange(300, device=PLACE), (RowRange(300, 0, 0),))
    for changed, selection, message in (
        (replace(rows, runs=None), Spans.dense(), "Rows.runs"),
        (rows, Spans.window(9), "must be Spans.dense"),
        (replace(rows, runs=(RowRange(300, 0, 7),)), Spans.dense(), "whole prompts"),
    ):
        with pytest.raises(Unsupported, match=message):
            attend(changed, kv, selection, scale=1.0, impl="sdpa_cudnn")
    with pytest.raises(Unsupported, match="no softcap"):
        attend(rows, kv, Spans.dense(), scale=1.0, softcap=2.0, impl="sdpa_flash")
