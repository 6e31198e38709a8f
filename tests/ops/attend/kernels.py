"""What the tests of attend's kernels share: where they run, and how far from the oracle they may be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from longreach.ops import KVView, Partial, Rows, Selection, attend
from longreach.testing.oracle import exact_attend
from longreach.testing.tolerance import assert_close, unit_roundoff

PLACE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU, Triton interprets
on_cpu = pytest.mark.skipif(PLACE == "cuda", reason="Numba compiles for CPUs")
needs_gpu = pytest.mark.skipif(PLACE == "cpu", reason="needs a CUDA device")
HALF = torch.bfloat16 if PLACE == "cuda" else torch.float16  # Triton's interpreter gets bf16 wrong
# what the hardware's exp2 (2 ulp), logits kept in base 2 and tensor cores that truncate sums cost more than the
# arithmetic that the bound is derived for
HARDWARE = 4.0


def here(x: Any) -> Any:
    """A tensor, or a dataclass of tensors, on the device that kernels run on."""
    if isinstance(x, torch.Tensor):
        return x.to(PLACE)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        given = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
        moved = {id(y): here(y) for y in given.values()}  # a tensor in two fields stays one
        return type(x)(**{name: moved[id(y)] for name, y in given.items()})
    if isinstance(x, tuple):
        parts = [here(y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def check(rows: Rows, kv: KVView, selection: Selection, impl: str = "triton", **logits: Any) -> Partial:
    """What the kernel gives for CPU tensors, after comparing it with the oracle's."""
    logits = {"scale": rows.q.shape[2] ** -0.5, **logits}
    got = attend(here(rows), here(kv), here(selection), **here_all(logits), impl=impl)
    held_to(got, exact_attend(rows, kv, selection, **logits), rows.q.dtype)
    return got


def here_all(given: dict[str, Any]) -> dict[str, Any]:
    return {name: here(x) for name, x in given.items()}


def held_to(got: Partial, want: Any, dtype: torch.dtype) -> None:
    half = dtype in (torch.float16, torch.bfloat16)
    unit = HARDWARE * unit_roundoff(torch.float32)
    assert_close(got, want, unit=unit, weights=unit_roundoff(dtype) if half else 0.0)
