"""How attend's kernels are launched. Measured on an H200; see docs/performance.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from longreach.ops.attend.triton_streams import INTERPRETED as _INTERPRETED

INTERPRETED: bool = _INTERPRETED.value


def next_power_of_2(n: int) -> int:
    """The least power of two of at least n >= 1. Triton's own takes several microseconds on the host."""
    return 1 << (n - 1).bit_length()


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


def tuning(dtype: torch.dtype, wide: int, m: int, *, lists: bool, page: int, dense: bool, items: int) -> Tuning:
    """The launch for head dim `wide` (a power of two), `m` rows x heads of a tile and `items` streams of keys.

    page: slots of one, 0 where memory is contiguous. From 32 streams on as many programs fit a multiprocessor as it is
    dealt, by registers or by shared memory: where more do, those that start while the kernel before holds some of them
    are crowded on the others.
    """
    if INTERPRETED:
        return Tuning(16 if wide <= 64 else 32, 1, 1, 1)
    vector = wide * dtype.itemsize
    if m > 32:  # prefill, and verification of several tokens: bound by tensor cores and registers
        return Tuning(64, 8 if m >= 128 else 4, 3 if vector <= 256 else 2, 2) if vector <= 512 else Tuning(32, 4, 2, 1)
    if m > 16:
        return Tuning(64 if vector <= 256 else 32, 4, 3, 2, unit=64 if page else 16, aligned=not dense)
    if vector > 256:
        return Tuning(32, 4, 3, 2, unit=32 if dense else 16)
    scale = max(1, 256 // vector)  # blocks of equal bytes
    narrow, wider = 32 * scale, 64 * scale
    few = items < 32
    if dense:
        t = Tuning(wider, 4, 3, 2, unit=wider, aligned=False)
        if page and items >= 256:  # 6% faster at 864 streams of 8K, equal at 256
            t = replace(t, unit=4 * wider)
        return t if few else replace(t, per_sm=3, registers=168)
    if not lists:
        return Tuning(narrow, 4, 4, 2) if few else Tuning(wider, 4, 4, 2, unit=wider)
    if few:
        return Tuning(narrow, 4, 3, 3, unit=narrow, registers=168)
    if page:
        return Tuning(narrow, 4, 3, 4, unit=narrow if page <= 16 else wider, registers=128)
    if items < 128:
        return Tuning(wider, 4, 3, 3, unit=wider, registers=168)
    return Tuning(wider, 4, 2, 4, registers=128)


def keeping_tuning(
    dtype: torch.dtype, wide: int, m: int, *, page: int, items: int, values: bool, coded: bool = False
) -> Tuning:
    """The launch of a dense pass that writes its logits: blocks lie at their multiples, so a unit is a block.

    coded: keys are 8-bit. Measured as layers of a whole step that keeps the GPU busy.
    """
    t = tuning(dtype, wide, m, lists=False, page=page, dense=True, items=items)
    if not INTERPRETED and m <= 16 and wide * dtype.itemsize <= 256:
        few, many = items < 32, items >= 128 and not page
        if coded:
            t = replace(t, stages=2 if many else 3, per_sm=4, registers=128)
        elif values:
            t = replace(t, stages=4 if few else 3)
        elif few:
            t = replace(t, per_sm=4, registers=128)
        else:  # a stage holds half as much: as many bytes are under way in blocks twice as long
            t = replace(t, block=2 * t.block, stages=2 if many else 3)
    return replace(t, block=min(t.block, 256), unit=min(t.block, 256))


def merge_tuning(wide: int, results: int, pieces: int, values: bool) -> tuple[int, int, bool]:
    """(channels of a result that a program puts together, its warps, whether the next kernel may start meanwhile).

    For `pieces` at once of each of `results`, with values or without, where scores are pooled next. Few are cut in
    channels, so that more multiprocessors take part: it counts where one stream is long. Behind few the next kernel
    starts early, as latency counts; behind many it would find multiprocessors taken here and there, and attention that
    starts among others stays slow.
    """
    if INTERPRETED:
        return max(16, wide // 2) if values else wide, 1, False
    if not values:
        return wide, 1, True
    channels, few = wide, results < 128
    while channels > 32 and results * (wide // channels) < 128:
        channels //= 2
    return channels, 4 if pieces * channels >= 2048 else 1, few
