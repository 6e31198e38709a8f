"""What fusion methods share: how a ratio is spent."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.methods.slots import PromptParts
from longreach.ops.types import require


def check_ratio(ratio: object) -> None:
    """Raise InvalidInput unless `ratio` is a number in [0, 1]."""
    number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
    require(number and 0 <= ratio <= 1, f"ratio: expected a number in [0, 1], got {ratio!r}")  # type: ignore[operator]


def best(scores: Tensor, prompt: PromptParts, ratio: float) -> Tensor:
    """bool [N]: the round(ratio N) candidates with the largest scores [N], all where there are fewer; ties go to the
    earlier."""
    candidates = prompt.candidates
    ranked = scores.double().masked_fill(~candidates, -torch.inf).sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(candidates)
    chosen[ranked[: round(ratio * len(candidates))]] = True
    return chosen & candidates
