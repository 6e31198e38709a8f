"""Attention results over sets of keys: put them together, reweight and mix them, take one out again.

(out, lse) pairs over disjoint sets combine as in online softmax (Milakov and Gimelshein, 2018; the merge
of FlashInfer and the amend step of MAC-Attention, Eq. 5-8).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.ops.types import Partial, describe, require


def merge(first: Partial, *others: Partial) -> Partial:
    """The result over the union of disjoint key sets. Partials: out [R, H, D], lse [R, H], all of one shape.

    lse = log sum_i exp(lse_i); out = sum_i exp(lse_i - lse) out_i. Associative and commutative up to
    rounding; an empty Partial changes nothing. Raises InvalidInput where shapes or dtypes differ.
    """
    for other in others:
        _alike(first, other)
    if not others:
        return first
    lses = torch.stack([first.lse, *(p.lse for p in others)])
    # not torch.logsumexp: its gradient over empty Partials alone is NaN
    top = _finite(lses.detach().amax(0))
    weight = torch.exp(lses - top)
    total = weight.sum(0)
    none = total == 0
    total = total.masked_fill(none, 1.0)
    out = sum(w[..., None] * p.out for w, p in zip(weight / total, (first, *others), strict=True))
    return Partial(out, (top + torch.log(total)).masked_fill(none, -torch.inf))


def shift(partial: Partial, log_weight: Tensor) -> Partial:
    """Multiply the weight of every key by exp(log_weight): lse + log_weight. log_weight: [R] or [R, H]."""
    rows, heads = partial.lse.shape
    ok = isinstance(log_weight, Tensor) and log_weight.is_floating_point()
    ok = ok and log_weight.shape in ((rows,), (rows, heads)) and log_weight.device == partial.lse.device
    require(ok, f"log_weight: expected float [{rows}] or [{rows}, {heads}], got {describe(log_weight)}")
    by = log_weight.to(partial.lse.dtype)
    lse = partial.lse + (by[:, None] if by.dim() == 1 else by)
    # weight 0 leaves no keys, and no keys have no value
    return Partial(partial.out.masked_fill((lse == -torch.inf)[..., None], 0.0), lse)


def mix(partials: Sequence[Partial], weights: Tensor) -> Partial:
    """One softmax over several key sets, every key of set s weighted by weights[..., s] (MKA, Eq. 5-14).

        lse = log sum_s w_s exp(lse_s)
        out = sum_s w_s exp(lse_s - lse) out_s

    partials: S Partials of one shape, out [R, H, D], lse [R, H]; a key may be in several sets.
    weights: float [R, S] or [R, H, S], at least 0. Weights 1 give `merge`. Unlike in `shift`, which takes the log of a
        weight, a weight of exactly 0 has a gradient: (exp(lse_s - lse)) (out_s - out) through out, exp(lse_s - lse)
        through lse. There the difference of the two lse is cut at 80 (700 in fp64), so that gradients stay finite.

    Returns Partial; over no keys, or where all weights are 0, out is 0 and lse -inf, without gradients.
    Differentiable in partials and weights. Raises InvalidInput for shapes, dtypes and devices that do not fit, and on a
    CPU for weights below 0.
    """
    require(len(partials) > 0, "partials: expected at least one Partial, got none")
    for other in partials:
        _alike(partials[0], other)
    lses = torch.stack([p.lse for p in partials], -1)
    rows, heads, sets = lses.shape
    ok = isinstance(weights, Tensor) and weights.is_floating_point() and weights.device == lses.device
    ok = ok and weights.shape in ((rows, sets), (rows, heads, sets))
    require(ok, f"weights: expected float [{rows}, {sets}] or [{rows}, {heads}, {sets}], got {describe(weights)}")
    if weights.device.type == "cpu":
        require(not bool((weights < 0).any()), "weights: expected numbers of at least 0; clamp them before")
    w = weights.to(lses.dtype).view(rows, -1, sets)
    top = torch.where(w > 0, lses, -torch.inf).detach().amax(-1, keepdim=True)
    most = 80.0 if lses.dtype == torch.float32 else 700.0  # exp of a little more overflows
    size = torch.exp((lses - _finite(top)).clamp(max=most))
    share = w * size
    total = share.sum(-1)
    none = total == 0
    total = total.masked_fill(none, 1.0)
    share = (share / total[..., None]).masked_fill(none[..., None], 0.0)
    out = torch.zeros_like(partials[0].out)
    for s, p in enumerate(partials):
        out = out + share[..., s, None] * p.out
    return Partial(out, (_finite(top)[..., 0] + torch.log(total)).masked_fill(none, -torch.inf))


def remove(whole: Partial, part: Partial) -> Partial:
    """Merge's inverse: the result over the keys of `whole` that are not in `part`.

    With s = exp(part.lse - whole.lse), the share removed: lse = whole.lse + log(1 - s) and
    out = (whole.out - s part.out) / (1 - s). Exact only in exact arithmetic: the relative error grows
    as 1 / (1 - s). Where 1 - s is not above the rounding of the two lse the result is empty, which
    `is_empty` of the result shows.
    """
    _alike(whole, part)
    size = _finite(whole.lse).abs() + _finite(part.lse).abs()
    ratio = part.lse - _finite(whole.lse)
    gone = (-torch.expm1(ratio) <= torch.finfo(ratio.dtype).eps * (4.0 + size)) | whole.is_empty
    left = -torch.expm1(ratio.masked_fill(gone, -torch.inf))  # 1 - s, and 1 if nothing is left
    lse = (whole.lse + torch.log(left)).masked_fill(gone, -torch.inf)
    out = (whole.out - (1.0 - left)[..., None] * part.out) / left[..., None]
    return Partial(out.masked_fill(gone[..., None], 0.0), lse)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _alike(a: Partial, b: Partial) -> None:
    for x in (a, b):
        require(isinstance(x, Partial), f"expected a Partial, got {describe(x)}")
    same = a.out.shape == b.out.shape and a.out.dtype == b.out.dtype and a.out.device == b.out.device
    require(same, f"partials: expected equal shape, dtype and device, got {describe(a.out)} and {describe(b.out)}")
