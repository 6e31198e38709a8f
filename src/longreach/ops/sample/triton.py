"""sample on the GPU: the launches of its kernels and the memory they share. Nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.checks import refuse_gradients
from longreach.ops.sample import splitting
from longreach.ops.sample import triton_kernels as kernels
from longreach.ops.sample.api import Sampled

INTERPRETED: bool = kernels.INTERPRETED.value
MOST_COLUMNS = 1 << 24  # so that weights keep enough of their 62 bits; see triton_kernels


@dataclass(frozen=True)
class Tuning:
    """How the kernels are launched.

    short: rows of up to so many columns are drawn from by one program, `whole` columns at a time, `whole_counted` where
    thresholds are tried; parts: of longer rows, None for `splitting.parts_of`; tile, counted: the same for a part;
    rounds: passes that look for the threshold; early: whether the next kernel, attention perhaps, may start while the
    last one runs.
    """

    short: int = splitting.SHORT
    whole: int = 2048
    whole_counted: int = 1024
    whole_warps: int = 16
    parts: int | None = None
    tile: int = 1024
    counted: int = 256
    warps: int = 4
    rounds: int = 3
    early: bool = False
    chained: bool = not INTERPRETED


def tuning(rows: int) -> Tuning:
    """The launch for so many rows: few of them leave multiprocessors idle."""
    return Tuning(early=rows < 32)


def sample(
    x: Tensor, count: Tensor, length: Tensor, offset: Tensor, *, capacity: int, uniform: float, power: float,
    first: int, last: int, tune: Tuning | None = None,
) -> Sampled:  # fmt: skip
    refuse(x)
    refuse_gradients("sample", x)
    lists, heads, columns = x.shape
    rows, device = lists * heads, x.device
    index = torch.empty(lists, heads, capacity, dtype=torch.int32, device=device)
    used = torch.empty(lists, heads, dtype=torch.int32, device=device)
    weight, factor = torch.empty(2, *index.shape, dtype=torch.float32, device=device).unbind()
    found = Sampled(index, used, weight, factor)
    if not rows:
        return found
    t = tune or tuning(rows)
    x = x.detach() if x.stride(2) == 1 or columns <= 1 else x.detach().contiguous()
    given = (
        x, *x.stride()[:2], count.contiguous(), length, length.stride(0), heads, columns, min(first, columns),
        min(last, columns), capacity,
    )  # fmt: skip
    law = {"UNIFORM": float(uniform), "POWER": float(power), "T": splitting.THRESHOLDS}
    # a column's weight must have the same bits in every kernel, so none may fuse a product with a sum
    how: dict[str, Any] = {"CHAINED": t.chained, "enable_fp_fusion": False} | (
        {"launch_pdl": True} if t.chained else {}
    )
    with torch.cuda.device_of(x):
        if columns <= t.short:
            tile = min(t.whole, max(128, triton.next_power_of_2(columns)))
            warps = max(1, min(t.whole_warps, tile // 128))
            kernels.alone[(rows,)](
                given, offset.contiguous(), tuple(found), **law, BN=tile, BC=min(t.whole_counted, tile), EARLY=t.early,
                num_warps=warps, **how,
            )  # fmt: skip
        else:
            _split(given, offset.contiguous(), found, law, how, t)
    return found


def _split(given: tuple, offset: Tensor, found: Sampled, law: dict[str, Any], how: dict[str, Any], t: Tuning) -> None:
    """Rows of many columns, by several programs each."""
    rows, columns, device = found.used.numel(), given[0].shape[2], given[0].device
    parts = t.parts or splitting.parts_of(rows, columns)
    sums = torch.empty(rows, parts, dtype=torch.float64, device=device)
    whole = torch.empty(rows, dtype=torch.float64, device=device)
    # of the last round and of this one
    reach = torch.empty(2, rows, parts, law["T"], dtype=torch.int32, device=device).unbind()
    rest = torch.empty(2, rows, parts, law["T"], dtype=torch.int64, device=device).unbind()
    state = torch.empty(2, rows, law["T"] + 3, dtype=torch.int64, device=device).unbind()
    memory = list(zip(state, reach, rest, strict=True))
    law = {**law, "PARTS": triton.next_power_of_2(parts), "BN": t.tile, "BC": t.counted}
    how = {**how, "num_warps": t.warps}
    grid = (rows, parts)
    kernels.total[grid](given, found.used, sums, POWER=law["POWER"], BN=t.tile, **how)
    for number in range(t.rounds):
        before, now = memory[(number + 1) % 2], memory[number % 2]
        kernels.look[grid](given, sums, whole, before, now, FIRST=number == 0, **law, **how)
    kernels.write[grid](
        given, offset, whole, memory[(t.rounds + 1) % 2], tuple(found), **law, EARLY=t.early, **how
    )  # fmt: skip


def refuse(x: Tensor) -> None:
    """Raise Unsupported for what these kernels cannot do and the reference can."""
    if x.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"sample's Triton kernels run on CUDA devices, got {x.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )
    if x.shape[2] > MOST_COLUMNS:
        raise Unsupported(
            f"sample's Triton kernels take at most {MOST_COLUMNS} columns, got {x.shape[2]}; use impl='reference'"
        )
    if INTERPRETED and x.dtype == torch.bfloat16:
        raise Unsupported("sample under TRITON_INTERPRET=1: the interpreter gets bf16 wrong; use fp16 or fp32")
