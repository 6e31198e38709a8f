"""Agreement of two calibrations of one model, on different texts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longreach.methods.kascade.anchors import choose, value
from longreach.methods.kascade.calibration_result import CalibrationResult
from longreach.ops.types import require


@dataclass(frozen=True)
class Comparison:
    """anchors: those of each, layer numbers. shared: how many layers are anchors in both.

    kept: the value of the first's anchors on the second's similarities, over the best possible there, and the other way
    round. heads: with the first's anchors, the share of heads of reuse layers that both map to the same head. given:
    the second's similarity of the heads that the first maps to, over its best.
    similarity, importance: Pearson's correlation of the similarities of pairs of different layers, unweighted, and of
    the importance; None for fewer than two numbers, or numbers that are all the same.
    """

    anchors: tuple[tuple[int, ...], tuple[int, ...]]
    shared: int
    kept: tuple[float, float]
    heads: float | None
    given: float | None
    similarity: float | None
    importance: float | None


def compare(one: CalibrationResult, other: CalibrationResult, budget: int) -> Comparison:
    """By the first's ranks and weights.

    Raises InvalidInput for calibrations of different models, or a budget that is no count of layers.
    """
    same = one.layers == other.layers and one.heads.shape == other.heads.shape
    same = same and one.importance.shape == other.importance.shape
    require(same, "expected two calibrations of one model, got other numbers of layers or heads")
    other = replace(other, ranks=one.ranks, weighted=one.weighted)
    choices = [choose(each.similarity, budget) for each in (one, other)]
    kept = (
        value(other.similarity, choices[0].anchors) / choices[1].value,
        value(one.similarity, choices[1].anchors) / choices[0].value,
    )
    anchors = choices[0].anchors
    alike, total, got, best = 0, 0, 0.0, 0.0
    for layer, (mine, theirs) in enumerate(zip(one.head_map(anchors), other.head_map(anchors))):
        if layer in anchors:
            continue
        anchor = max(a for a in anchors if a < layer)
        alike += sum(a == b for a, b in zip(mine, theirs))
        total += len(mine)
        given = other.within[anchor, :, layer]
        got += float(given[list(mine), range(len(mine))].sum())
        best += float(given.amax(0).sum())
    above = torch.ones(len(one.layers), len(one.layers), dtype=torch.bool).triu(1)
    first, second = (tuple(each.layers[a] for a in c.anchors) for each, c in zip((one, other), choices))
    return Comparison(
        anchors=(first, second),
        shared=len({*first} & {*second}),
        kept=kept,
        heads=alike / total if total else None,
        given=got / best if total else None,
        similarity=correlation(one.plain[above], other.plain[above]),
        importance=correlation(one.importance, other.importance),
    )


def correlation(x: Tensor, y: Tensor) -> float | None:
    """Pearson's correlation; None if it is not defined."""
    if len(x) < 2 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return None
    return float(torch.corrcoef(torch.stack([x, y]).double())[0, 1])
