"""Whether two greedy answers of one model differ for no other reason than rounding."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


def first_difference(a: Tensor, b: Tensor) -> int | None:
    """The first place where two rows of tokens [T] differ; None where one begins the other."""
    length = min(a.shape[0], b.shape[0])
    places = (a[:length] != b[:length]).nonzero()
    return int(places[0]) if places.numel() else None


@torch.no_grad()
def assert_tied(model: Any, ours: Tensor, theirs: Tensor) -> None:
    """Fail unless rows of tokens [B, T], prompts included, part only where the model itself is undecided.

    ours, theirs: what two ways of running `model` (in bf16 or fp16, nothing attached) chose greedily; no padding.
    At the first token in which a row differs, both ways read the same context. There the two choices must be tied
    within the model's rounding: e is the largest error of a logit of the model's own pass over that context against
    fp64 with the same weights. Either way may err twice as much as that pass in either logit, so the exact logits of
    the two choices may differ by 4 e + 4 e in all, and no other token may be further ahead of them.
    """
    exact_model = None
    for row, other in zip(ours, theirs, strict=True):
        place = first_difference(row, other)
        if place is None:
            continue
        exact_model = exact_model or copy.deepcopy(model).double()
        context = other[None, :place]
        exact = exact_model(context).logits[0, -1].double()
        error = (model(context).logits[0, -1].double() - exact).abs().max()
        behind = exact.max() - torch.stack([exact[row[place]], exact[other[place]]]).min()
        assert float(behind) <= 8 * float(error), (
            f"token {place}: {int(row[place])} and {int(other[place])} were chosen, {float(behind):.3g} of a logit "
            f"from the best; rounding explains {8 * float(error):.3g}"
        )
