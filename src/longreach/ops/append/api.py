"""The front door of append."""

from __future__ import annotations

from torch import Tensor

from longreach.ops.impl import Implementations
from longreach.ops.types import INTS, describe, require

IMPLEMENTATIONS = Implementations(
    "append", {"reference": "longreach.ops.append.reference:append", "triton": "longreach.ops.append.triton:append"}
)


def append(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, page: Tensor, offset: Tensor, *, impl: str = "auto"
) -> None:
    """Write k and v [R, G, D] to places (page, offset) [R] of memory: keys and values [P, G, page, D], in place.

    Any strides whose last dimension is contiguous in memory; places are distinct and inside it. One kernel on a GPU.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, UnknownName for an unknown impl.
    """
    require(
        keys.dim() == 4 and values.shape == keys.shape,
        lambda: f"values: expected {describe(keys)}, got {describe(values)}",
    )
    rows = page.shape[0] if page.dim() == 1 else -1
    shape = (rows, keys.shape[1], keys.shape[3])
    for name, x in (("k", k), ("v", v)):
        fits = x.shape == shape and x.dtype == keys.dtype and x.device == keys.device
        require(fits, lambda: f"{name}: expected {keys.dtype} {list(shape)} on {keys.device}, got {describe(x)}")
    for name, x in (("page", page), ("offset", offset)):
        fits = x.shape == (rows,) and x.dtype in INTS and x.device == keys.device
        require(fits, lambda: f"{name}: expected int [R] on {keys.device}, got {describe(x)}")
    require(keys.stride(3) == values.stride(3) == 1, "keys, values: expected a contiguous last dimension")
    IMPLEMENTATIONS.get(impl, keys.device)(keys, values, k, v, page, offset)
