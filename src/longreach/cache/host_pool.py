"""Pinned host memory that the caches of a process use one after another: pages are touched and pinned only once."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.cache.host import HUGE_PAGE, allocate, check_available
from longreach.errors import CapacityError
from longreach.ops.types import require

SLAB = 6_500_000_000  # bytes: four layers' keys of 8 x 96K tokens (G=8, D=128, bf16), or three of 1M tokens


@dataclass
class _Slab:
    """memory: uint8 [n]. used: bytes at its start that are lent."""

    memory: Tensor
    used: int = 0

    def fits(self, nbytes: int) -> int:
        """Number of blocks of this size that can still be lent."""
        return (self.memory.numel() - self.used) // _aligned(nbytes)


class HostPool:
    """Memory of layers in host memory, allocated in slabs that hold many layers of any size.

    Blocks are lent until `reclaim`, after which their caches must not be used. Only one cache may be in use at a time
    if it is to get all memory. Contents are those that the last cache left: a cache reads only slots that it wrote.
    seconds: spent on allocation so far. nbytes: allocated.
    """

    def __init__(self, device: torch.device, slab: int = SLAB):
        self.device = torch.empty(0, device=device).device  # of "cuda", the number of the GPU too
        self.slab, self.seconds = slab, 0.0
        self._slabs: list[_Slab] = []

    @property
    def nbytes(self) -> int:
        return sum(slab.memory.numel() for slab in self._slabs)

    def reserve(self, count: int, nbytes: int) -> None:
        """Allocate what is missing for `count` further blocks of `nbytes` each.

        If the host has too little memory for that, slabs that lend nothing are freed first, as their size may not suit.
        Raises CapacityError with nothing allocated.
        """
        each, missing = _aligned(nbytes), self._missing(count, nbytes)
        try:
            check_available(missing * each)
        except CapacityError:
            self._slabs = [slab for slab in self._slabs if slab.used]
            missing = self._missing(count, nbytes)
            check_available(missing * each)
        started, before = time.perf_counter(), len(self._slabs)
        try:
            while missing > 0:
                some = min(missing, max(1, self.slab // each))
                self._slabs.append(_Slab(allocate((some * each,), torch.uint8, self.device)))
                missing -= some
        except BaseException:
            del self._slabs[before:]
            raise
        finally:
            self.seconds += time.perf_counter() - started

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory [shape] of the pool's device, with any contents, lent until `reclaim`. Raises as `reserve`.

        Raises InvalidInput for another device.
        """
        require(device == self.device, lambda: f"device: expected the pool's, {self.device}, got {device}")
        nbytes = math.prod(shape) * dtype.itemsize
        self.reserve(1, nbytes)
        slab = next(slab for slab in self._slabs if slab.fits(nbytes))
        found = slab.memory[slab.used : slab.used + nbytes]
        slab.used += _aligned(nbytes)
        return found.view(dtype).view(*shape)

    def reclaim(self) -> None:
        """All memory may be lent again, once the device is done with it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for slab in self._slabs:
            slab.used = 0

    def _missing(self, count: int, nbytes: int) -> int:
        return max(0, count - sum(slab.fits(nbytes) for slab in self._slabs)) if nbytes else 0


def _aligned(nbytes: int) -> int:
    """Blocks start at huge pages, as if each had been allocated alone."""
    return max(1, -(-nbytes // HUGE_PAGE)) * HUGE_PAGE
