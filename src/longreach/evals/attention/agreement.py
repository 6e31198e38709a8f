"""Whether layers attend most to the same keys, as Kascade assumes when one layer chooses keys for others."""

from __future__ import annotations

import torch
from torch import Tensor

K = 256
MOST = 1 << 24  # entries looked up at a time


class Agreement:
    """Over rows, how much of the K heaviest keys of each KV head are among those of each head of another layer.

    Heads are KV heads, by the sum of the weights of their query heads, as Kascade pools them when it decodes. Blocks of
    rows begin with `start` and go through the layers in ascending order.
    """

    def __init__(self, kinds: int, layers: int, heads: int, device: torch.device):
        shape = (kinds, layers, heads, layers, heads)  # keys chosen in (layer, head), for (layer, head)
        self.recall = torch.zeros(shape, dtype=torch.float64, device=device)
        self.mass = torch.zeros_like(self.recall)
        self.rows = torch.zeros(kinds, dtype=torch.float64, device=device)
        self._chosen: list[tuple[Tensor, Tensor]] = []

    def start(self, kind: Tensor) -> None:
        """A pass over rows of these kinds [r] begins."""
        self._chosen = []
        self.rows.index_add_(0, kind, torch.ones(len(kind), dtype=torch.float64, device=kind.device))

    def add(self, kind: Tensor, pooled: Tensor) -> None:
        """The next layer's weights fp32 [r, G, n], 0 on keys invisible to a row."""
        layer, (count, heads, keys) = len(self._chosen), pooled.shape
        top = pooled.topk(min(K, keys), -1)
        there = top.values > 0  # a window, or a short text, holds fewer
        self._chosen.append((top.indices, there))
        size, held = there.sum(-1).double(), top.values.sum(-1, dtype=torch.float64)  # [r, G]
        mine = torch.zeros_like(pooled, dtype=torch.bool).scatter_(-1, top.indices, there)
        step = max(1, MOST // (heads * heads * top.indices.shape[-1]))
        for other, (index, valid) in enumerate(self._chosen):
            for part in torch.arange(count, device=kind.device).split(step):
                at = index[part][:, :, None].expand(-1, -1, heads, -1)  # [r, G of other, G, K]
                known = valid[part][:, :, None]
                both = (_look_up(mine[part], at) & known).sum(-1).double()
                got = (_look_up(pooled[part], at) * known).sum(-1, dtype=torch.float64)
                of_other = valid[part].sum(-1).double()[:, :, None]
                self.mass[:, other, :, layer].index_add_(0, kind[part], got / held[part][:, None])
                self.recall[:, other, :, layer].index_add_(0, kind[part], both / size[part][:, None])
                if other != layer:
                    turned = (both / of_other).transpose(1, 2)
                    self.recall[:, layer, :, other].index_add_(0, kind[part], turned)

    def maps(self, kind: int) -> dict[str, list[list[float | None]]]:
        """[layer that chooses][layer that takes]: each head takes the keys of the head that serves it best over all
        rows.

        recall: the share of its K heaviest keys that are among the chosen. mass: the weight of the chosen keys over
        that of its own K heaviest, for layers after the choosing one (Kascade's similarity, but means over rows); None
        before it.
        """
        rows = self.rows[kind]
        recall, mass = (x[kind].amax(1).mean(-1).div(rows).tolist() for x in (self.recall, self.mass))
        return {
            "recall": recall,
            "mass": [[v if j >= i else None for j, v in enumerate(row)] for i, row in enumerate(mass)],
        }


def _look_up(values: Tensor, at: Tensor) -> Tensor:
    """values [r, G, n] at [r, A, G, K] -> [r, A, G, K]."""
    return values[:, None].expand(-1, at.shape[1], -1, -1).gather(-1, at)
