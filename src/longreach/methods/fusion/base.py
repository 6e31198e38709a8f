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

    Scores are on the prompt's device and compared in fp32; among equal ones the earlier token is chosen. NaN is smaller
    than all numbers. Does not wait for the device.
    """
    count = _count(prompt, ratio)
    if not count:
        return prompt.at[:0]
    at = prompt.candidates_at
    most, length = torch.tensor([[[count]], [[len(at)]]]).to(scores.device, non_blocking=True)
    index, _ = top_k(scores.float()[at][None, None], most, length, capacity=count)
    return at[index[0, 0]]


def best_on_host(scores: Tensor, prompt: PromptParts, ratio: float) -> Tensor:
    """As `best`, of scores on the host: the device gets only the result."""
    count = _count(prompt, ratio)
    if not count:
        return prompt.at[:0]
    candidates = prompt.stored & ~prompt.exact
    ranked = scores.float()[candidates]
    numbers = ranked[~ranked.isnan()]
    if len(numbers) <= count:
        larger, equal = ~ranked.isnan(), ranked.isnan()
    else:
        least = numbers.topk(count, sorted=False).values.min()
        larger, equal = ranked > least, ranked == least
    chosen = larger | (equal & (equal.cumsum(0) <= count - larger.sum()))
    return prompt.index(candidates.masked_scatter(candidates, chosen))


def _count(prompt: PromptParts, ratio: float) -> int:
    """Tokens that a ratio is spent on."""
    return min(round(ratio * len(prompt.stored)), prompt.candidate_count)
