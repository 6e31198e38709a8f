"""Copies by kernels, which reach host memory from within a captured graph. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from longreach.ops import triton_copies_kernels as kernels

INTERPRETED: bool = kernels.INTERPRETED.value
BLOCK = 1024


def copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The second tensors become copies of the first: contiguous ones, each pair of one shape and dtype."""
    flat = [(_words(x, to)) for x, to in pairs if x.numel()]
    if not flat:
        return
    sizes = tuple(x.numel() for x, _ in flat)
    with torch.cuda.device_of(flat[0][0]):
        kernels.copy_all[(triton.cdiv(max(sizes), BLOCK), len(flat))](
            tuple(x for x, _ in flat), tuple(to for _, to in flat), sizes, BLOCK=BLOCK
        )


def copy_lists(source: Tensor, to: Tensor, count: Tensor) -> None:
    """Copy the entries in use of lists [..., C], count [...], converted to the dtype of `to`. All are contiguous."""
    room = source.shape[-1]
    if count.numel() and room:
        with torch.cuda.device_of(source):
            kernels.copy_lists[(count.numel(), triton.cdiv(room, BLOCK))](source, to, count, room, BLOCK=BLOCK)


def _words(x: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory as numbers of 4 bytes, or of one if it has no whole number of words."""
    size = x.numel() * x.element_size()
    words = size % 4 == 0 and x.data_ptr() % 4 == 0 and to.data_ptr() % 4 == 0
    dtype = torch.int32 if words else torch.uint8
    first, second = (y.reshape(-1).view(torch.uint8).view(dtype) for y in (x, to))
    return first, second
