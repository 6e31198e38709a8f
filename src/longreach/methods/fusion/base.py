"""Shared by fusion methods: how a ratio is spent."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.methods.slots import PromptParts
from longreach.ops import top_k
from longreach.ops.types import require


def check_ratio(ratio: object) -> None:
    """Raise InvalidInput unless `ratio` is a number in [0, 1]."""
    number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
    require(number and 0 <= ratio <= 1, f"ratio: expected a number in [0, 1], got {ratio!r}")  # type: ignore[operator]


def best(scores: Tensor, prompt: PromptParts, ratio: float) -> Tensor:
    """bool [N]: the round(ratio N) candidates with the largest scores [N], all where there are fewer.

    Scores are compared in fp32; among equal ones the earlier token is chosen.
    """
    candidates = prompt.candidates
    size, count = len(candidates), round(ratio * len(candidates))
    chosen = torch.zeros_like(candidates)
    if count:
        most, length = (torch.full((1, 1), number, device=scores.device) for number in (count, size))
        ranked = scores.float().masked_fill(~candidates, -torch.inf)[None, None]
        index, _ = top_k(ranked, most, length, capacity=count)
        chosen[index[0, 0].long()] = True
    return chosen & candidates
