"""Directions and sizes of keys and values: the first key, the mean key, and values around an output."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longreach.evals.sampling_study.estimators import SINKS
from longreach.evals.sampling_study.exact import Exact

ENDS = (0.05, 0.95)  # quantiles between which a range lies


class KeyGeometry:
    """First and mean keys of prompts, by layer and KV head. Keys as they are attended to, after rotation."""

    def __init__(self, layers: int):
        self.first: list[list[Tensor]] = [[] for _ in range(layers)]  # [G, D] of each prompt
        self.mean: list[list[Tensor]] = [[] for _ in range(layers)]
        self.other: list[list[Tensor]] = [[] for _ in range(layers)]  # of texts that begin with other tokens
        self.norms: list[list[Tensor]] = [[] for _ in range(layers)]  # [G]

    def add(self, layer: int, k: Tensor, v: Tensor) -> None:
        """All keys and values [n, G, D] of a prompt. The mean leaves the first SINKS keys out."""
        norms = v.norm(dim=-1)
        self.first[layer].append(k[0].double())
        self.mean[layer].append(k[SINKS:].double().mean(0))
        self.norms[layer].append((norms[0] / norms[SINKS:].median(0).values).double())

    def results(self) -> dict[str, Any]:
        """[layers][KV heads]; None for a layer that was not measured, or where there is one text only.

        first_keys, mean_keys: {"min", "mean"} of the cosine between prompts. first_keys_other: between first keys of
        texts that begin with different tokens. first_to_mean: of the first key and the mean key, mean over prompts.
        first_value_norm: norm of the first value over the median one, mean over prompts.
        """
        cosines = [[F.cosine_similarity(a, b, dim=-1) for a, b in zip(*both, strict=True)]
                   for both in zip(self.first, self.mean, strict=True)]  # fmt: skip
        return {
            "first_keys": _pairs(self.first), "mean_keys": _pairs(self.mean), "first_keys_other": _pairs(self.other),
            "first_to_mean": [_mean(x) for x in cosines], "first_value_norm": [_mean(x) for x in self.norms],
        }  # fmt: skip


def _pairs(layers: list[list[Tensor]]) -> dict[str, list[list[float] | None]]:
    found: dict[str, list[list[float] | None]] = {"min": [], "mean": []}
    for texts in layers:
        cosines = [F.cosine_similarity(a, b, dim=-1) for a, b in combinations(texts, 2)]
        found["min"].append(torch.stack(cosines).amin(0).tolist() if cosines else None)
        found["mean"].append(_mean(cosines))
    return found


def _mean(values: list[Tensor]) -> list[float] | None:
    return torch.stack(values).mean(0).tolist() if values else None


def ranges(exact: Exact) -> dict[str, Tensor]:
    """The range from 5% to 95% over the visible keys of each row, fp32 [R, H] (MagicPIG, Fig. 10).

    value_distance: of log |v_i - o|; logits: of logits.
    """
    group = exact.share.shape[1] // exact.v.shape[1]
    v = exact.v.transpose(0, 1).repeat_interleave(group, 0)  # [H, n, D]
    products = torch.einsum("rhd,hnd->rhn", exact.out, v)
    squares = v.square().sum(-1) - 2 * products + exact.out.square().sum(-1, keepdim=True)
    distance = 0.5 * squares.clamp(min=1e-30).log()
    return {"value_distance": _range(distance, exact.context), "logits": _range(exact.logits, exact.context)}


def _range(x: Tensor, context: Tensor) -> Tensor:
    """x [R, H, n], of which a row has the first context [R]."""
    ends = torch.tensor(ENDS, dtype=x.dtype, device=x.device)
    low, high = torch.stack([x[r, :, :n].quantile(ends, -1) for r, n in enumerate(context.tolist())], 1)
    return high - low
