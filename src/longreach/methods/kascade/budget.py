"""Number of keys that Kascade chooses (section 4.1), and the heads that it sums scores over."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longreach.methods.call import LayerCall


class KeyBudget(NamedTuple):
    """The options of `Kascade` about the number of chosen keys and the scores that choose them.

    k: a count, or a fraction of the context with at least min_keys. dense_below: shorter contexts keep all keys.
    sinks, recent: first and last tokens that are always chosen. shared: one set serves all heads of all ranks.
    """

    k: int | float
    min_keys: int
    dense_below: int
    sinks: int
    recent: int
    shared: bool

    def keys(self, available: Tensor, context: Tensor) -> Tensor:
        """int64: keys chosen of the `available` ones, for rows or tiles of this context."""
        if isinstance(self.k, int):
            chosen = available.clamp(max=self.k)
        else:  # the fraction as the caller wrote it: 0.29 of 100 is 29, not 28.999999999999996 rounded down
            chosen = (self.k * available.double() + 1e-9).long().clamp(min=self.min_keys).minimum(available)
        return torch.where(context < self.dense_below, available, chosen) if self.dense_below else chosen

    def max_keys(self, capacity: int) -> int:
        """The largest of `keys` for contexts up to `capacity`."""
        chosen = self.k if isinstance(self.k, int) else max(int(self.k * capacity + 1e-9), self.min_keys)
        return min(max(chosen, self.dense_below - 1), capacity)

    def over_heads(self, call: LayerCall, scores: Tensor) -> Tensor:
        """Pooled scores [L, G, N] as they are, or summed over the heads of all ranks: [L, 1, N]."""
        return call.sum_over_ranks(scores.sum(1, keepdim=True)) if self.shared else scores
