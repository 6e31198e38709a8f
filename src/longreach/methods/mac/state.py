"""What MAC keeps for one layer: the ring, and the numbers its options come to there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from longreach.cache.ring import RowRing
from longreach.methods.mac.diagnostics import summary
from longreach.ops.match import Rule


class LayerState(RowRing):
    """rule: what a match is here. weight: fp32 [H, D], what queries are multiplied by for it, None for nothing."""

    def __init__(
        self, slots: int, heads: int, kv_heads: int, dim: int, rule: Rule, weight: Tensor | None, like: Tensor
    ):
        super().__init__(slots, heads, kv_heads, dim, rule.window, like)
        self.rule, self.weight = rule, weight
        self.summary: Callable[[Tensor, int], dict[str, Any]] = partial(
            summary, ring_bytes=self.bytes_per_sequence, band=rule.band
        )

    def force(self, gap: int) -> None:
        """For timing alone: from now on a row finds the one `gap` positions back, if the ring holds it, and no other.

        What is read is what would be: the whole window is looked through, the entry taken is that row's own. Steps
        that were captured before go on as they were.
        """
        self.rule = replace(self.rule, near=gap, far=gap, limit=math.inf, deepest=None, patience=math.inf)
