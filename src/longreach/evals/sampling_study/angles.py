"""How many keys hash tables sample, predicted from the angles of queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longreach.evals.sampling_study.exact import Exact
from longreach.methods.magicpig.schedule import Schedule
from longreach.ops.simhash.probability import MOST_TABLES, inclusion

BINS = 1 << 12
LEAST = 2


class Angles:
    """A histogram of p = 1 - angle / pi of queries and centred keys, of the keys that MagicPIG has in its tables.

    The mean of u (Eq. 10) over it is the share that a query head samples, over random projections.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.count = torch.zeros(BINS, dtype=torch.float64)

    def add(self, q: Tensor, exact: Exact, tokens: int, layer: int) -> None:
        """q: [R, H, D] of the rows. tokens: before the first row, which the layer's tables follow from."""
        first, stop = self.schedule.sinks, int(self.schedule.stop(torch.tensor(tokens), layer))
        k = exact.k[first:stop] - exact.k[first : first + self.schedule.centre].mean(0)
        q = q.float().unflatten(1, (k.shape[1], -1))
        cosine = torch.einsum("rgxd,ngd->rgxn", q, k)
        size = q.norm(dim=-1)[..., None] * k.norm(dim=-1).T[None, :, None]
        p = 1 - (cosine / size.clamp(min=1e-30)).clamp(-1, 1).acos() / math.pi
        self.count += torch.histc(p, BINS, 0, 1).double().cpu()

    def share(self, bits: int, tables: int) -> float:
        """The share of the keys in the tables that a query head samples."""
        p = (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS
        return float((inclusion(p, bits, tables, LEAST) * self.count).sum() / self.count.sum())

    def tables_for(self, bits: int, share: float) -> int:
        """The number of tables with which a query head samples nearest to `share` of the keys."""
        low, high = LEAST, MOST_TABLES
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.share(bits, middle) < share else (low, middle)
        return min((low, high), key=lambda tables: abs(self.share(bits, tables) - share))
