"""Choice of anchor layers (Kascade, Algorithm 1) and its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from longreach.errors import InvalidInput


@dataclass(frozen=True)
class AnchorSet:
    """anchors: places in S, ascending, the first 0. value: the sum of S[anchor of l][l], the higher the better."""

    anchors: tuple[int, ...]
    value: float


def check_anchors(budget: int, layers: int) -> None:
    """Raise InvalidInput unless `budget` layers of `layers` can be anchors."""
    if not 1 <= budget <= layers:
        raise InvalidInput(
            f"budget: expected 1 to {layers} anchors, as many as there are layers of full attention, got {budget}; "
            f"choose another --budget"
        )


def choose(similarity: Tensor, budget: int) -> AnchorSet:
    """The best `budget` anchors for S [n, n], the first layer among them, by dynamic programming.

    An anchor serves itself and the layers up to the next one. Among equal values the last anchor is as early as
    possible, then the one before it, and so on. Raises InvalidInput for a budget outside 1 to n.
    """
    check_anchors(budget, similarity.shape[0])
    return next(islice(_each_budget(similarity), budget - 1, None))


def _each_budget(similarity: Tensor) -> Iterator[AnchorSet]:
    """`choose` for 1, 2, ... anchors, each from the one before it."""
    layers = similarity.shape[0]
    served = torch.nn.functional.pad(similarity.double().cumsum(1), (1, 0)).tolist()  # [i][j]: layers before j

    def segment(first: int, stop: int) -> float:
        return served[first][stop] - served[first][first]

    # best[j]: the best value of layers before j with m anchors; came[m][j]: where the last of these anchors begins
    best = {stop: segment(0, stop) for stop in range(1, layers + 1)}
    came = list[dict[int, int]]()
    while layers in best:
        anchors, stop = list[int](), layers
        for starts_at in reversed(came):
            stop = starts_at[stop]
            anchors.append(stop)
        chosen = (0, *reversed(anchors))
        yield AnchorSet(chosen, value(similarity, chosen))
        ways = {stop: [(best[first] + segment(first, stop), first) for first in best if first < stop] for stop in best}
        starts = {stop: max(found, key=lambda way: (way[0], -way[1])) for stop, found in ways.items() if found}
        came.append({stop: first for stop, (_, first) in starts.items()})
        best = {stop: value for stop, (value, _) in starts.items()}


def fewest(similarity: Tensor, served: Tensor, least: float) -> AnchorSet:
    """The fewest anchors that serve every layer, and of as many the best by Algorithm 1.

    similarity: S [n, n]. served: [n, n], the share of its best weight that a layer (column) finds on the keys of an
    anchor (row); 1 on the diagonal. least: in [0, 1], the share that each layer must find on the keys of its anchor.
    The paper fixes the number of anchors. Where it is too small, some layer finds little of what it looks for.
    """
    if not 0 <= least <= 1:
        raise InvalidInput(f"served: expected a share in [0, 1], got {least!r}; choose another --served")
    short = served < least
    price = 1.0 + float(similarity.clamp(min=0).double().sum())  # more than all layers are worth together
    priced = torch.where(short, similarity.double() - price, similarity.double())
    found = next(one for one in _each_budget(priced) if value(short.double(), one.anchors) == 0)
    return AnchorSet(found.anchors, value(similarity, found.anchors))


def value(similarity: Tensor, anchors: Sequence[int]) -> float:
    """The sum over layers of S[anchor of the layer][layer]."""
    total, anchor = 0.0, anchors[0]
    for layer, column in enumerate(similarity.double().T.tolist()):
        anchor = layer if layer in anchors else anchor
        total += column[anchor]
    return total


def evenly(layers: int, budget: int) -> tuple[int, ...]:
    """`budget` evenly spaced anchors, the first layer included: the baseline of Algorithm 1."""
    check_anchors(budget, layers)
    return tuple(layers * i // budget for i in range(budget))


def share_read(layers: int, anchors: int, share: float) -> float:
    """Bytes of keys and values read in decoding over dense attention's, where layers attend to `share` of the keys.

    The first layer reads all, an anchor all keys and its share of the values, the others their share of both.
    """
    return (1 + (anchors - 1) * (1 + share) / 2 + (layers - anchors) * share) / layers


def curve(similarity: Tensor, budgets: Sequence[int]) -> list[AnchorSet]:
    """The best anchors of each budget."""
    return [choose(similarity, budget) for budget in budgets]
