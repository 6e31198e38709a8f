"""MAC's measurements of a model: distances of queries, energy of keys, weight on bands.

Pure functions of captured tensors. Distances are kept as counts in bins, which add up over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.methods.mac.plan import MACPlan, Scale
from longreach.methods.mac.policy import limit_of
from longreach.ops import RotaryAngles

WINDOWS = (64, 128, 256, 512, 1024, 2048, 4096)
BANDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LOW, HIGH, PER_OCTAVE = -24, 12, 32  # of squared distances, by their logarithm to base 2
BINS = 1 + (HIGH - LOW) * PER_OCTAVE  # the first is that of 0
KEEP = 0.99  # the chosen window accepts at least this share of the rows that the widest one accepts
OF_EQUALS = 0.99  # the threshold if too many unrelated rows are equal: it still accepts most of them in 16 bits


def energy(k: Tensor, turn: RotaryAngles) -> Tensor:
    """fp64 [N, G, D]: squares of keys [N, G, D] as a query before rotation meets them, even within a pair of channels.

    A pair meets all angles, so its energy counts half for either channel; rotation leaves it as it is, but for a
    scaling (YaRN's) that queries get too, and so counts twice.
    """
    square = k.double().square()
    pairs = turn.cos.shape[-1]
    size = (turn.cos.double().square() + turn.sin.double().square())[:, None]
    turned = square[..., : 2 * pairs]
    if turn.layout == "half":
        mean = turned.unflatten(-1, (2, pairs)).mean(-2) * size
        mean = torch.cat([mean, mean], -1)
    else:
        mean = (turned.unflatten(-1, (pairs, 2)).mean(-1) * size).repeat_interleave(2, -1)
    return torch.cat([mean, square[..., 2 * pairs :]], -1)


def masses(share: Tensor, pos: Tensor, bands: Sequence[int], sinks: int) -> Tensor:
    """fp64 [h, bands]: sums over rows of the weight on each row's last keys, over its weight without the first `sinks`.

    share: [r, h, n], weights of rows at pos [r] on keys 0 to n.
    """
    x = share.double().clone()
    x[..., :sinks] = 0
    after = x.flip(-1).cumsum(-1).flip(-1)  # weight on key n and all after it
    first = (pos[:, None] + 1 - torch.tensor(list(bands), device=pos.device)).clamp(min=0)  # [r, bands]
    found = after.gather(-1, first[:, None].expand(-1, share.shape[1], -1))
    return (found / after[..., :1].clamp(min=1e-30)).sum(0)


def counts(distance: Tensor) -> Tensor:
    """int64 [BINS] of squared distances of any shape: 0 is in the first bin, outliers in the second or the last."""
    place = (distance.double().clamp(min=2.0**LOW).log2() - LOW) * PER_OCTAVE
    place = torch.where(distance == 0, 0, 1 + place.long().clamp(0, BINS - 2))
    return torch.bincount(place.flatten(), minlength=BINS)


def edge(number: int) -> float:
    """The lower edge of a bin, a squared distance."""
    return 2.0 ** (LOW + (number - 1) / PER_OCTAVE) if number else 0.0


def quantile(found: Tensor, share: float) -> float:
    """The largest edge below which at most `share` of the counts [BINS] lie; 0 if that is below all bins."""
    total = int(found.sum())
    below = found.cumsum(0) - found  # before each bin
    last = int((below <= share * total).nonzero()[-1])
    return edge(last) if total and last > 1 else 0.0


def share_below(found: Tensor, distance: float) -> float:
    """The share of counts [BINS] in bins that end at or below a squared distance; 0 for a distance of 0."""
    ends = torch.tensor([0.0, *(edge(n + 1) for n in range(1, BINS))], dtype=torch.float64)
    below = (ends <= distance * (1 + 1e-9)) & (distance > 0)
    return float(found[below].sum() / found.sum().clamp(min=1))


def unrelated(q: Tensor, pos: Tensor, apart: int) -> Tensor:
    """Squared distances of queries [S, H, D] at pos [S] of all pairs at least `apart` positions apart: [H, pairs]."""
    first, second = torch.triu_indices(len(pos), len(pos), 1, device=pos.device)
    far = (pos[first] - pos[second]).abs() >= apart
    return (q[second[far]] - q[first[far]]).square().sum(-1).T


def nearest(q: Tensor, before: Tensor, windows: Sequence[int]) -> Tensor:
    """The smallest squared distance of a query [H, D] to the last rows `before` [W, H, D] in each window: [windows, H].

    before: ascending by position, the row just before the query last.
    """
    distance = (q[None] - before).square().sum(-1).flip(0)  # [W, H], the newest first
    least = distance.cummin(0).values
    return torch.stack([least[min(w, len(before)) - 1] for w in windows])


def tau_of(scale: Scale, distance: float, dim: int) -> float:
    """The threshold for this squared distance, at least 0; OF_EQUALS for a distance of 0."""
    unit = 2.0 * dim if scale == "sqrt2d" else 1.0
    return max(0.0, 1.0 - math.sqrt(distance / unit)) if distance else OF_EQUALS


def choose_band(mass: Sequence[float], bands: Sequence[int], epsilon: float, widest: int) -> int | None:
    """The narrowest band of at most `widest` keys with a mean weight of at least 1 - epsilon, else None."""
    return next((band for band, x in zip(bands, mass, strict=True) if band <= widest and x >= 1 - epsilon), None)


def choose_window(accepted: Sequence[float], windows: Sequence[int]) -> int:
    """The narrowest window that accepts KEEP of the rows that the widest one accepts."""
    return next(w for w, share in zip(windows, accepted, strict=True) if share >= KEEP * accepted[-1])


def plan_of(
    windows: Sequence[int],
    bands: Sequence[Sequence[float]],
    taken: Sequence[bool],
    far: dict[Scale, Tensor],
    close: dict[Scale, Tensor],
    energies: Tensor,
    *,
    alpha: float,
    epsilon: float,
    widest: int,
    sinks: int,
) -> tuple[MACPlan, dict[str, list[list[float]]]]:
    """The plan, and the share of rows that each window accepts, by the calibrated threshold: {scale: [L][windows]}.

    bands: mean weight on each of BANDS, layer by layer; taken: the layers of full attention; far: counts of distances
    of unrelated queries [L, BINS] under each scale; close: of nearest queries [L, windows, BINS]; energies: [L, G, D].
    alpha: share of unrelated pairs that pass; sinks: first tokens that the weight on bands leaves out.
    """
    dim, layers = energies.shape[2], range(len(taken))
    tau, accepted = dict[Scale, tuple[float, ...]](), dict[str, list[list[float]]]()
    for scale, found in far.items():
        tau[scale] = tuple(tau_of(scale, quantile(found[n], alpha), dim) if taken[n] else 0.0 for n in layers)
        limits = [limit_of(scale, x, dim) for x in tau[scale]]
        accepted[scale] = [[share_below(x, limits[n]) for x in close[scale][n]] for n in layers]
    plan = MACPlan(
        window=tuple(choose_window(accepted["sqrt2d"][n], windows) if taken[n] else 1 for n in layers),
        band=tuple(choose_band(bands[n], BANDS, epsilon, widest) if taken[n] else None for n in layers),
        tau=tau,
        energy=energies,
        sinks=sinks,
    )
    return plan, accepted
