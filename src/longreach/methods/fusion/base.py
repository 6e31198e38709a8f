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
    """int64 [r], ascending: the round(ratio N) candidates with the largest scores [N], all where there are fewer.

    Scores are compared in fp32; among equal ones the earlier token is chosen. NaN is smaller than all numbers.
    """
    size = len(prompt.stored)
    count = min(round(ratio * size), prompt.candidate_count)
    if not count:
        return prompt.at[:0]
    least = torch.finfo(torch.float32).min
    ranked = scores.float().nan_to_num(nan=least, posinf=torch.inf)  # -inf becomes `least` too
    ranked = ranked.masked_fill(~prompt.candidates, -torch.inf)
    most, length = (torch.full((1, 1), number, device=scores.device) for number in (count, size))
    index, _ = top_k(ranked[None, None], most, length, capacity=count)
    return index[0, 0].long()
