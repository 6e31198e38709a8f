"""The front door of append."""

from __future__ import annotations

from torch import Tensor

from longreach.ops.checks import check_written
from longreach.ops.impl import Implementations

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
    check_written(keys, values, k, v, page, offset)
    IMPLEMENTATIONS.get(impl, keys.device)(keys, values, k, v, page, offset)
