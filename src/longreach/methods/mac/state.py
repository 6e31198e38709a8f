"""MAC's state of one layer: the ring and the layer's rule."""

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
    """rule: the layer's rule. weight: fp32 [H, D], factors of queries in the match, else None."""

    def __init__(
        self, slots: int, heads: int, kv_heads: int, dim: int, rule: Rule, weight: Tensor | None, like: Tensor
    ):
        super().__init__(slots, heads, kv_heads, dim, rule.window, like)
        self.rule, self.weight = rule, weight
        self.summary: Callable[[Tensor, int], dict[str, Any]] = partial(
            summary, ring_bytes=self.bytes_per_sequence, band=rule.band
        )

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.weight is None else self.weight.nbytes)

    def force(self, gap: int) -> None:
        """For timing only: from now on a row matches the row `gap` positions back if the ring holds it, and no other.

        Reads are as in a real hit: the whole window is searched, and the entry is that row's own. Steps captured
        earlier keep their rule.
        """
        self.rule = replace(self.rule, near=gap, far=gap, limit=math.inf, deepest=None, patience=math.inf)
