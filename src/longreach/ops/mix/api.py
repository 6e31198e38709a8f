"""The entry point of mix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.ops.impl import Implementations
from longreach.ops.partial import alike
from longreach.ops.selection import Selection
from longreach.ops.types import KVView, Partial, Rows, describe, require

IMPLEMENTATIONS = Implementations(
    "mix", {"reference": "longreach.ops.mix.reference:mix", "triton": "longreach.ops.mix.triton:mix"}
)


class KeySet(NamedTuple):
    """Keys that rows attend to: those that `selection` chooses of `kv`."""

    rows: Rows
    kv: KVView
    selection: Selection


def mix(partials: Sequence[Partial], weights: Tensor, *, impl: str = "auto") -> Partial:
    """One softmax over several key sets, every key of set s weighted by weights[..., s] (MKA, Eq. 5-14).

        lse = log sum_s w_s exp(lse_s)
        out = sum_s w_s exp(lse_s - lse) out_s

    partials: S Partials of one shape, out [R, H, D], lse [R, H]; a key may be in several sets.
    weights: float [R, S] or [R, H, S], at least 0. Weights of 1 give `merge`. Unlike in `shift`, which takes the log of
        a weight, a weight of exactly 0 has a gradient: exp(lse_s - lse) (out_s - out) through out, exp(lse_s - lse)
        through lse. With `top` the largest lse of a set of weight above 0, lse_s - top is cut at 80 in it (700 in
        fp64), so that gradients stay finite.
    impl: "auto" or one of `IMPLEMENTATIONS.names()`.

    Returns Partial; over no keys, or where all weights are 0, out is 0 and lse -inf, without gradients.
    Differentiable in partials and weights ("triton" once). Raises InvalidInput for shapes, dtypes and devices that do
    not fit, and on a CPU for weights below 0; UnknownName for an unknown impl; Unsupported for fp64 in Triton.
    """
    require(len(partials) > 0, "partials: expected at least one Partial, got none")
    for other in partials:
        alike(partials[0], other)
    lse = partials[0].lse
    each = check_weights(weights, lse.shape, len(partials), lse.device)
    found: Partial = IMPLEMENTATIONS.get(impl, lse.device)(tuple(partials), each)
    return found


def check_weights(weights: Tensor, shape: Sequence[int], sets: int, device: torch.device) -> Tensor:
    """Weights as [R, H, S]. shape: (R, H). Raises InvalidInput."""
    rows, heads = shape
    ok = isinstance(weights, Tensor) and weights.is_floating_point() and weights.device == device
    ok = ok and weights.shape in ((rows, sets), (rows, heads, sets))
    require(ok, f"weights: expected float [{rows}, {sets}] or [{rows}, {heads}, {sets}], got {describe(weights)}")
    if weights.device.type == "cpu":
        require(not bool((weights < 0).any()), "weights: expected numbers of at least 0; clamp them before")
    return weights if weights.dim() == 3 else weights[:, None].expand(rows, heads, sets)


def largest_gap(dtype: torch.dtype) -> float:
    """The most by which the lse of a set of weight 0 counts as larger than the others': exp of a little more
    overflows."""
    return 700.0 if dtype == torch.float64 else 80.0
