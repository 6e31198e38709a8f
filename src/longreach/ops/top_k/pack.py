"""pack_lists: lists of a common capacity, behind one another in memory of their exact size."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.doors import Op, nothing
from longreach.ops.impl import Implementations
from longreach.ops.types import INTS, describe, require

IMPLEMENTATIONS = Implementations(
    "pack_lists",
    {
        "reference": "longreach.ops.top_k.pack_reference:pack_lists",
        "triton": "longreach.ops.top_k.triton_pack:pack_lists",
    },
)


def pack_lists(index: Tensor, used: Tensor, offsets: Tensor, into: Tensor, *, impl: str = "auto") -> None:
    """Write the lists that `top_k` made to their places in the memory of `PackedLists`. Nothing waits for the device.

    index: int32 [L, heads, C], used: int32 [L, heads], as top_k gives them; no list may have overflowed.
    offsets: int32 or int64 [L * heads + 1]: list l of head h goes to into[offsets[l * heads + h]:], up to the next
        list's place. Entries that do not fit there are left out; with top_k's own counts there are none.
    into: int32 [E], written in place.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, UnknownName for an unknown impl.
    """
    ok = isinstance(index, Tensor) and index.dtype == torch.int32 and index.dim() == 3
    require(ok, lambda: f"index: expected int32 [L, heads, C], got {describe(index)}")
    ok = isinstance(used, Tensor) and used.dtype == torch.int32 and used.shape == index.shape[:2]
    require(ok, lambda: f"used: expected int32 {list(index.shape[:2])}, got {describe(used)}")
    ok = isinstance(offsets, Tensor) and offsets.dtype in INTS and offsets.shape == (used.numel() + 1,)
    require(ok, lambda: f"offsets: expected int32 or int64 [{used.numel() + 1}], got {describe(offsets)}")
    ok = isinstance(into, Tensor) and into.dtype == torch.int32 and into.dim() == 1 and into.is_contiguous()
    require(ok, lambda: f"into: expected int32 [E], contiguous, got {describe(into)}")
    for name, x in (("used", used), ("offsets", offsets), ("into", into)):
        require(x.device == index.device, lambda: f"{name}: expected on {index.device} like index, got {describe(x)}")
    IMPLEMENTATIONS.get(impl, index.device, index)(index, used, offsets, into)


PACK = Op(pack_lists, IMPLEMENTATIONS, (), nothing)
