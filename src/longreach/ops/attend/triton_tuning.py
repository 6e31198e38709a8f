"""How attend's kernels are launched. Measured on an H200; see docs/performance.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from longreach.ops.attend.triton_kernels import INTERPRETED as _INTERPRETED

INTERPRETED: bool = _INTERPRETED.value


@dataclass(frozen=True)
class Tuning:
    """block: keys of a block; stages: blocks under way at a time; per_sm: programs a multiprocessor is dealt."""

    block: int
    warps: int
    stages: int
    per_sm: int
    chained: bool = not INTERPRETED

    def programs(self, device: torch.device) -> int:
        """Programs among which blocks are dealt out."""
        return 3 if INTERPRETED else self.per_sm * _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def tuning(dtype: torch.dtype, wide: int, m: int, *, lists: bool, dealt: bool, items: int) -> Tuning:
    """The launch for head dim `wide` (a power of two) and `m` rows x heads of a tile."""
    if INTERPRETED:
        return Tuning(16 if wide <= 64 else 32, 1, 1, 1)
    bytes_a_key = wide * dtype.itemsize
    if m > 32:
        block = 64 if bytes_a_key <= 256 else 32
        return Tuning(block, 8 if m >= 128 else 4, 2, 1)
    block = 128 if bytes_a_key <= 128 else 64 if bytes_a_key <= 256 else 32
    return Tuning(block, 4, 3, 2)
