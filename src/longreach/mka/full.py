"""Attention of MKA: all tokens (level 1), all running means (level 2), the tokens of recalled blocks (level 3).

    softmaxes (Algorithm 1):  out = sum_l w_l softmax(s q.K_l) V_l
    gated (Eq. 5-14):         out = sum_l w_l exp(s q.K_l) V_l / sum_l w_l exp(s q.K_l)

A key may be in levels 1 and 3 at once, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.mka.config import Mode
from longreach.mka.router import at_least_zero
from longreach.ops.mix import mix
from longreach.ops.types import Partial, require


def combine(sets: Sequence[Partial], weights: Tensor, mode: Mode, *, impl: str = "auto") -> Tensor:
    """The levels' results in one: [R, H, D]. weights: [R, levels], as `Router` makes them.

    At weights (1, 0, 0) this is bit for bit the first result.
    """
    require(weights.shape[1] == len(sets), lambda: f"weights: expected one for each of {len(sets)} levels")
    if mode == "gated":
        return mix(sets, at_least_zero(weights), impl=impl if impl in ("reference", "triton") else "auto").out
    return weighted_sum([one.out for one in sets], weights)


def weighted_sum(outs: Sequence[Tensor], weights: Tensor) -> Tensor:
    """sum_l w_l out_l over outputs [R, H, D], fp32 (fp64 for fp64)."""
    total = torch.zeros_like(outs[0], dtype=weights.dtype)
    for level, out in enumerate(outs):
        total = total + weights[:, level, None, None] * out
    return total
