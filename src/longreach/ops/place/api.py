"""The front door of place."""

from __future__ import annotations

from torch import Tensor

from longreach.ops.impl import Implementations
from longreach.ops.rope import RotaryAngles
from longreach.ops.types import INTS, describe, require

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
    for name, x in (("cos", angles.cos), ("sin", angles.sin)):
        fits = x.dim() == 2 and x.shape == (rows, angles.cos.shape[-1]) and 2 * x.shape[1] <= shape[2]
        fits = fits and x.is_floating_point() and x.device == keys.device
        require(
            fits,
            lambda: (
                f"{name}: expected float [R={rows}, rotary/2] on {keys.device}, rotary at most {shape[2]}, "
                f"got {describe(x)}"
            ),
        )
    IMPLEMENTATIONS.get(impl, keys.device)(keys, values, k, v, page, offset, angles)
