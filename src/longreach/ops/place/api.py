"""The front door of place."""

from __future__ import annotations

from torch import Tensor

from longreach.ops.checks import check_written
from longreach.ops.impl import Implementations
from longreach.ops.rope import RotaryAngles
from longreach.ops.types import describe, require

IMPLEMENTATIONS = Implementations(
    "place", {"reference": "longreach.ops.place.reference:place", "triton": "longreach.ops.place.triton:place"}
)


def place(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, page: Tensor, offset: Tensor, angles: RotaryAngles, *,
    impl: str = "auto",
) -> None:  # fmt: skip
    """Rotate k and write it and v to places (page, offset) [R] of memory, in place: one read, one write, one kernel.

    keys, values: [P, G, page, D]; k, v: [R, G, D] of the same dtype; any strides whose last dimension is contiguous.
    Places are distinct and inside memory. angles: cos and sin float [R, rotary/2] of each row, rotary <= D; channels
    after the first `rotary` are written as they are (all of them for rotary = 0). Computed in fp32 (fp64 for fp64).
    A3, section 3.1 (arXiv 2511.17560, Eq. 1-2): keys stored before rotation are turned to their true positions.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, UnknownName for an unknown impl.
    """
    check_written(keys, values, k, v, page, offset)
    rows, dim = k.shape[0], k.shape[2]
    for name, x in (("cos", angles.cos), ("sin", angles.sin)):
        fits = x.dim() == 2 and x.shape == (rows, angles.cos.shape[-1]) and 2 * x.shape[1] <= dim
        fits = fits and x.is_floating_point() and x.device == keys.device
        require(
            fits,
            lambda: (
                f"{name}: expected float [R={rows}, rotary/2] on {keys.device}, rotary at most {dim}, got {describe(x)}"
            ),
        )
    IMPLEMENTATIONS.get(impl, keys.device)(keys, values, k, v, page, offset, angles)
