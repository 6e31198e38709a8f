"""Correctness checks of timed results: outputs against fp64, on some heads of some sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.bench.case import Memory
from longreach.bench.inputs import Inputs
from longreach.errors import LongreachError


class WrongResult(LongreachError):
    """The timed code computes a wrong result."""


def bound(dtype: torch.dtype) -> float:
    """Relative error (norms) that rounding explains: weights and results rounded once each to `dtype`, eps / 2 each."""
    return max(torch.finfo(dtype).eps, 1e-4)


@torch.no_grad()
def error(inputs: Inputs, memory: Memory, rows: int, out: Tensor, copy: int = 0) -> float:
    """Largest relative error |out - exact| / |exact| over the query heads of each sampled sequence and KV head.

    out: [B * rows, H, D] of `copy`. NaN where anything is.
    """
    shape = inputs.shape
    group = shape.heads // shape.kv_heads
    got = out.view(shape.batch, rows, shape.kv_heads, group, shape.dim).double()
    worst = torch.zeros((), dtype=torch.float64, device=out.device)
    for seq in sorted({0, shape.batch // 2, shape.batch - 1}):
        for head in sorted({0, shape.kv_heads - 1}):
            for row in sorted({0, rows // 2, rows - 1}):
                want = exact(inputs, memory, rows, copy, seq, head, row)
                off = (got[seq, row, head] - want).norm(dim=-1) / want.norm(dim=-1)
                worst = torch.maximum(worst, off.max())  # NaN stays
    return float(worst) if bool(torch.isfinite(out).all()) else float("nan")


def exact(inputs: Inputs, memory: Memory, rows: int, copy: int, seq: int, head: int, row: int) -> Tensor:
    """fp64 [query heads of the KV head, D]: the textbook formula over the keys visible to the row."""
    slots = inputs.seen(copy, seq, head, inputs.shape.context - rows + row)
    k, v = inputs.kv(copy, memory)
    if memory.page is None:
        keys, values = k[seq, head, slots], v[seq, head, slots]
    else:
        pages = inputs.table(memory.page)[seq].long()[slots // memory.page]
        keys, values = (x[pages, head, slots % memory.page] for x in (k, v))
    group = inputs.shape.heads // inputs.shape.kv_heads
    q = inputs.q(copy, rows)[seq * rows + row, head * group : (head + 1) * group].double()
    weights = torch.softmax(q @ keys.double().T * inputs.scale, -1)
    return weights @ values.double()


def require_right(name: str, inputs: Inputs, memory: Memory, rows: int, out: Tensor) -> float:
    """The error; raises WrongResult if it exceeds the rounding error."""
    off = error(inputs, memory, rows, out)
    most = bound(inputs.dtype)
    if not off <= most:
        raise WrongResult(f"{name}: relative error {off:.2e} of its output exceeds {most:.1e}; its time does not count")
    return off
