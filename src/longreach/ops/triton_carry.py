# mypy: ignore-errors
"""One token of a running mean, for Triton kernels of several ops."""

from __future__ import annotations

import triton


@triton.jit
def next_mean(x, mean, held):
    """The running mean with x in it, fp32; held: the weight of `mean`, decayed by one token. 1 + held is the new weight."""
    return (x + held * mean) * (1.0 / (1.0 + held))
