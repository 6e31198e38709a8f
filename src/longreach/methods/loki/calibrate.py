"""Principal directions of the keys of prompts. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Of a number of keys of a text: their mean [..., D] and mean outer product [..., D, D], fp64."""

    keys: int
    mean: Tensor
    product: Tensor


def moments(k: Tensor) -> Moments:
    """The moments of keys [n, G, D]: [G, D] and [G, D, D]."""
    k = k.double()
    return Moments(k.shape[0], k.mean(0), torch.einsum("ngd,nge->gde", k, k) / k.shape[0])


def moments_of(shape: tuple[int, int], k: Tensor) -> Moments:
    """As `moments`, [G, D] and [G, D, D] with G, D = shape; zeros for keys of another shape.

    A layer has other keys only if it has a sliding window, where no method uses its directions.
    """
    if tuple(k.shape[1:]) == shape:
        return moments(k)
    zero = k.new_zeros(*shape, shape[1], dtype=torch.float64)
    return Moments(k.shape[0], zero[..., 0], zero)


def together(parts: Sequence[Moments]) -> Moments:
    """The moments of all texts together, with equal weight for each key."""
    keys = sum(part.keys for part in parts)

    def mean(of: Sequence[Tensor]) -> Tensor:
        return torch.stack([x.double() * (part.keys / keys) for x, part in zip(of, parts, strict=True)]).sum(0)

    return Moments(keys, mean([part.mean for part in parts]), mean([part.product for part in parts]))


def principal(found: Moments) -> tuple[Tensor, Tensor]:
    """(basis [..., D, D], variance [..., D]): basis[..., i] is the direction of the i-th largest variance, fp64.

    The covariance's eigenvectors (Loki, section 3): a part common to all keys shifts all scores of a query equally, so
    it does not change their order. Of a direction and its opposite, the one with a positive largest part.
    """
    covariance = found.product - found.mean[..., :, None] * found.mean[..., None, :]
    variance, basis = torch.linalg.eigh((covariance + covariance.mT) / 2)
    variance, basis = variance.flip(-1).clamp(min=0), basis.flip(-1)
    largest = basis.gather(-2, basis.abs().argmax(-2, keepdim=True))
    return basis * torch.where(largest < 0, -1.0, 1.0), variance
