"""How attend's kernels are launched. Measured on an H200; see docs/performance.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from longreach.ops.attend.triton_streams import INTERPRETED as _INTERPRETED

INTERPRETED: bool = _INTERPRETED.value


@dataclass(frozen=True)
class Tuning:
    """block: keys of a block; stages: blocks under way at a time; per_sm: programs a multiprocessor is dealt.

    unit: keys in which work is dealt out; registers: the most a thread may use (128 lets four programs of four warps
    run at once), None for what the compiler likes; aligned: streams of equal length end where a program's share ends
    (long ones read in step then, and with strides of a power of two from the same memory channels at a time);
    chained: by programmatic dependent launch.
    """

    block: int
    warps: int
    stages: int
    per_sm: int
    unit: int = 16
    registers: int | None = None
    aligned: bool = True
    chained: bool = not INTERPRETED

    def programs(self, device: torch.device) -> int:
        """Programs among which blocks are dealt out."""
        return 3 if INTERPRETED else self.per_sm * _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def tuning(
    dtype: torch.dtype, wide: int, m: int, *, lists: bool, paged: bool, dense: bool, items: int, keys: bool = True
) -> Tuning:
    """The launch for head dim `wide` (a power of two), `m` rows x heads of a tile and `items` streams of keys.

    keys: whether they are read, else values alone.
    """
    if INTERPRETED:
        return Tuning(16 if wide <= 64 else 32, 1, 1, 1)
    vector = wide * dtype.itemsize
    if m > 32:  # prefill, and verification of several tokens: bound by tensor cores and registers
        return Tuning(64, 8 if m >= 128 else 4, 3 if vector <= 256 else 2, 2) if vector <= 512 else Tuning(32, 4, 2, 1)
    if m > 16:
        return Tuning(64 if vector <= 256 else 32, 4, 3, 2, aligned=not dense)
    scale = max(1, 256 // vector)  # blocks of equal bytes
    narrow = Tuning(32 * scale, 4, 3, 3, registers=168)  # three programs run at once
    wider = replace(narrow, block=64 * scale, unit=64 * scale)
    if vector > 256:
        return Tuning(32, 4, 3, 2, unit=32 if dense else 16)
    if lists and items >= 128 and not paged:
        return Tuning(64 * scale, 4, 2 if keys else 3, 4, registers=128)
    if lists:
        resident, unit = (3, 32) if items < (32 if paged else 128) else (4, 64 if items < 128 else 128)
        return replace(narrow, per_sm=resident, unit=unit * scale, registers=128)
    if not dense:
        return replace(narrow, stages=4) if items < 128 else replace(narrow, per_sm=4, unit=32 * scale, registers=128)
    return replace(wider, per_sm=2 if paged or items < 128 else 3, aligned=False)


def keeping_tuning(
    dtype: torch.dtype, wide: int, m: int, *, paged: bool, items: int, values: bool, coded: bool = False
) -> Tuning:
    """The launch of a dense pass that writes its logits: blocks lie at their multiples, so a unit is a block.

    coded: keys are 8-bit. Measured as layers of a whole step that keeps the GPU busy: there two stages are enough, and
    the clock stays up.
    """
    t = tuning(dtype, wide, m, lists=False, paged=paged, dense=True, items=items)
    if not INTERPRETED and m <= 16 and wide * dtype.itemsize <= 256:
        if coded:
            t = replace(t, per_sm=4, registers=128)
        elif not values:  # a stage holds half as much: as many bytes are under way in blocks twice as long
            t = replace(t, block=2 * t.block, per_sm=2)
        if items >= 128 and not paged:
            t = replace(t, stages=2, per_sm=4 if coded else 3)
    return replace(t, block=min(t.block, 256), unit=min(t.block, 256))
