# mypy: ignore-errors
"""One token of a running mean, for Triton kernels of several ops."""

from __future__ import annotations

import triton


@triton.jit
def next_mean(x, mean, held):
    """The running mean with x in it, fp32. held: weight of `mean`, decayed by one token; the new weight is 1 + held."""
    return (x + held * mean) * (1.0 / (1.0 + held))
