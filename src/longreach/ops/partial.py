"""Attention results over sets of keys: put them together, reweight them, take one out again.

(out, lse) pairs over disjoint sets combine as in online softmax (Milakov and Gimelshein, 2018; the merge
of FlashInfer and the amend step of MAC-Attention, Eq. 5-8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.types import Partial, Pieces, describe, require


def merge(first: Partial, *others: Partial) -> Partial:
    """The result over the union of disjoint key sets. Partials: out [R, H, D], lse [R, H], all of one shape.

    lse = log sum_i exp(lse_i); out = sum_i exp(lse_i - lse) out_i. Associative and commutative up to
    rounding; an empty Partial changes nothing. Raises InvalidInput where shapes or dtypes differ.
    """
    for other in others:
        alike(first, other)
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


def merge_pieces(pieces: Pieces) -> Partial:
    """The result over the keys of all pieces."""
    out = pieces.out.masked_fill((pieces.lse == -torch.inf)[..., None], 0.0)
    return merge(*(Partial(o, x) for o, x in zip(out, pieces.lse, strict=True)))


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


def remove(whole: Partial, part: Partial) -> Partial:
    """Merge's inverse: the result over the keys of `whole` that are not in `part`.

    With s = exp(part.lse - whole.lse), the share removed: lse = whole.lse + log(1 - s) and
    out = (whole.out - s part.out) / (1 - s). Exact only in exact arithmetic: the relative error grows
    as 1 / (1 - s). Where 1 - s is not above the rounding of the two lse the result is empty, which
    `is_empty` of the result shows.
    """
    alike(whole, part)
    size = _finite(whole.lse).abs() + _finite(part.lse).abs()
    ratio = part.lse - _finite(whole.lse)
    gone = (-torch.expm1(ratio) <= torch.finfo(ratio.dtype).eps * (4.0 + size)) | whole.is_empty
    left = -torch.expm1(ratio.masked_fill(gone, -torch.inf))  # 1 - s, and 1 if nothing is left
    lse = (whole.lse + torch.log(left)).masked_fill(gone, -torch.inf)
    out = (whole.out - (1.0 - left)[..., None] * part.out) / left[..., None]
    return Partial(out.masked_fill(gone[..., None], 0.0), lse)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def alike(a: Partial, b: Partial) -> None:
    """Raise InvalidInput unless both are Partials of one shape, dtype and device."""
    for x in (a, b):
        require(isinstance(x, Partial), f"expected a Partial, got {describe(x)}")
    same = a.out.shape == b.out.shape and a.out.dtype == b.out.dtype and a.out.device == b.out.device
    require(same, f"partials: expected equal shape, dtype and device, got {describe(a.out)} and {describe(b.out)}")
