"""Loss if the queries of a tile share keys, by way of choosing: Figures 5 and 6 of Kascade on any model.

And when each row chooses by itself in each layer: Figure 2.

A tile attends to its chosen keys and to itself. Told are the share of a row's weight that falls on these, and how far
the output over these is from the whole output, |o' - o| / |o|: means over rows and query heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.evals.attention.masses import TOPS, by_size
from longreach.evals.attention.weights import weights, window_of
from longreach.evals.calibration.gather import Gather
from longreach.evals.calibration.oracle import SHARES as ORACLE_SHARES
from longreach.evals.calibration.oracle import alone, over_layers
from longreach.evals.calibration.prompts import Prompt
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.kascade.calibrate import TILE, tile_tokens
from longreach.methods.kascade.plan import KascadePlan

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)  # query rows of a tile, the query heads of a KV head counted
SHARES = (0.025, 0.05, 0.1, 0.2, 0.3)  # of the keys before a tile that it chooses
SHARE, LEAST = 0.1, 128  # Kascade's choice: min(max(0.1 P, 128), P) of P keys
POOLINGS = ("pre", "post")
MAPPINGS = ("mapped", "own", "all", "oracle")


class Tile(NamedTuple):
    """One KV head's weights over a tile.

    share [T, group, n]: softmax over the keys visible to a row; q [T, group, D]; k, v [n, D], all fp32; before: keys
    before the tile.
    """

    share: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    before: int

    def first(self, tokens: int) -> Tile:
        """The tile of the first `tokens` tokens."""
        return Tile(self.share[:tokens], self.q[:tokens], self.k, self.v, self.before)


def kept(tile: Tile, chosen: Tensor) -> tuple[float, float]:
    """(weight, error): means over a tile's rows and heads, where it attends to the keys `chosen` [k] and to itself."""
    mask = torch.zeros(tile.share.shape[-1], dtype=torch.bool, device=chosen.device)
    mask[chosen], mask[tile.before :] = True, True
    some = tile.share * mask
    held = some.sum(-1)
    whole, part = tile.share @ tile.v, (some @ tile.v) / held[..., None]
    error = (part - whole).norm(dim=-1) / whole.norm(dim=-1).clamp(min=1e-30)
    return float(held.mean()), float(error.mean())


def pooled(tile: Tile, how: str) -> Tensor:
    """Scores [before] of the keys before a tile.

    post: weights after the softmax, summed over rows and heads; pre: products with the mean query (a soft cap does not
    change their order).
    """
    if how == "post":
        return tile.share.sum((0, 1))[: tile.before]
    return tile.k[: tile.before] @ tile.q.mean((0, 1))


def budget(before: int, share: float, least: int) -> int:
    """min(max(share * before, least), before)."""
    return min(max(int(share * before + 1e-9), least), before)


class SharingGather(Gather):
    """Of each prompt, over some tiles: the weight of the top 256 keys of each layer and query head (Fig. 1), what
    pooling before and after the softmax keeps by the size of a tile (Fig. 5), what ways of taking an anchor's keys keep
    by their number (Fig. 6), and what rows keep that choose by themselves (Fig. 2), in each layer.

    tiles: how many of each prompt, evenly spaced over its last three quarters. plan: anchors and the head map.
    """

    def __init__(self, shape: ModelShape, plan: KascadePlan, tiles: int):
        self.shape, self.plan, self.tiles = shape, plan, tiles
        self.group = shape.query_heads // shape.kv_heads
        self.sizes = tuple(s for s in SIZES if s >= self.group) or (self.group,)
        self.tile = plan.tile or TILE
        self.span = max(tile_tokens(s, self.group) for s in (*self.sizes, self.tile))

    def chunk(self, tokens: int) -> int:
        """Whole tiles of the largest size."""
        return -(-tokens // self.span) * self.span

    @property
    def needed(self) -> int:
        """Tokens of a prompt at least: with fewer, a tile would choose all keys."""
        return (-(-2 * LEAST // self.span) + 1) * self.span

    def starts(self, length: int) -> list[int]:
        """Starts of the tiles measured in a prompt: whole ones, at multiples of the largest size."""
        last = length // self.span - 1
        first = max(-(-2 * LEAST // self.span), last // 4)
        count = min(self.tiles, last - first + 1)
        return sorted({(first + (last - first) * i // max(1, count - 1)) * self.span for i in range(count)})

    def begin(self, prompt: Prompt) -> None:
        self._starts = self.starts(len(prompt.tokens))
        layers, n = self.shape.layers, len(self._starts)
        self._top = torch.zeros(layers, self.shape.query_heads, dtype=torch.float64)
        self._pooling = {how: torch.zeros(2, len(self.sizes), layers, dtype=torch.float64) for how in POOLINGS}
        self._mapping = {how: torch.zeros(2, len(SHARES), layers, dtype=torch.float64) for how in MAPPINGS}
        self._oracle = torch.zeros(2, len(ORACLE_SHARES), layers, dtype=torch.float64)
        self._anchor: dict[int, Tensor] = {}
        self._count = n

    def layer(self, call: LayerCall, outcome: Outcome) -> None:
        if window_of(call) is not None:
            return
        pos = call.rows.pos
        first, last = int(pos[0]), int(pos[-1])
        for start in self._starts:
            if first <= start and start + self.span - 1 <= last:
                self._tile(call, outcome, start, torch.arange(start - first, start - first + self.span))

    def _tile(self, call: LayerCall, outcome: Outcome, start: int, index: Tensor) -> None:
        layer, keys = call.layer, start + self.span
        index = index.to(call.rows.q.device)
        heads = [self._head(call, outcome, start, index, head, keys) for head in range(self.shape.kv_heads)]
        for head, tile in enumerate(heads):
            mine = slice(head * self.group, (head + 1) * self.group)
            top = by_size(tile.share)["tops"][..., TOPS.index(256)]
            self._top[layer, mine] += top.mean(0).cpu() / self._count
            for how in POOLINGS:
                for place, size in enumerate(self.sizes):
                    one = tile.first(tile_tokens(size, self.group))
                    chosen = pooled(one, how).topk(budget(start, SHARE, LEAST)).indices
                    self._add(self._pooling[how], place, layer, kept(one, chosen))
        whole = [tile.first(tile_tokens(self.tile, self.group)) for tile in heads]
        for tile in whole:
            self._oracle[..., layer] += alone(tile.share, tile.v, start + 1) / (self._count * self.shape.kv_heads)
        scores = torch.stack([pooled(tile, "post") for tile in whole])  # [G, before]
        if layer in self.plan.anchors:
            self._anchor[start] = scores
        theirs = self._anchor[start]
        for place, share in enumerate(SHARES):
            size = budget(start, share, 1)
            every = theirs.sum(0).topk(size).indices
            for head, tile in enumerate(whole):
                given = {
                    "mapped": theirs[self.plan.head_map[layer][head]].topk(size).indices,
                    "own": theirs[head].topk(size).indices,
                    "all": every,
                    "oracle": scores[head].topk(size).indices,
                }
                for how, chosen in given.items():
                    self._add(self._mapping[how], place, layer, kept(tile, chosen))

    def _head(self, call: LayerCall, outcome: Outcome, start: int, index: Tensor, head: int, keys: int) -> Tile:
        slots = torch.arange(keys, device=index.device)
        page, offset = call.kv.locate(call.rows.seq[:1].expand(keys), slots)
        q = call.rows.q[index, head * self.group : (head + 1) * self.group].float()
        k, v = (memory[page, head, offset].float() for memory in (call.kv.k, call.kv.v))
        return Tile(weights(call, index, head, keys).share, q, k, v, start)

    def _add(self, to: Tensor, place: int, layer: int, found: tuple[float, float]) -> None:
        to[:, place, layer] += torch.tensor(found, dtype=torch.float64) / (self._count * self.shape.kv_heads)

    def finish(self) -> dict[str, Any]:
        return {
            "tiles": self._count,
            "top": self._top.tolist(),
            "pooling": {how: x.tolist() for how, x in self._pooling.items()},
            "mapping": {how: x.tolist() for how, x in self._mapping.items()},
            "oracle": self._oracle.tolist(),
        }


def shared(what: SharingGather, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over prompts, and over layers: for pooling all of full attention but the first, which attends densely; for
    the ways of taking keys those that take an anchor's."""
    layers, anchors = what.plan.layers, what.plan.anchors
    reusing = [n for n in layers if n not in anchors]

    def mean(*path: str) -> Tensor:
        found = []
        for part in parts:
            value: Any = part
            for name in path:
                value = value[name]
            found.append(torch.tensor(value, dtype=torch.float64))
        return torch.stack(found).mean(0)

    def over(x: Tensor, kept_layers: Sequence[int]) -> dict[str, list[float] | None]:
        names = ("weight", "error")
        if not kept_layers:
            return dict.fromkeys(names)
        means = x[..., list(kept_layers)].mean(-1)
        return {name: row.tolist() for name, row in zip(names, means, strict=True)}

    return {
        "tiles": sum(part["tiles"] for part in parts),
        "top_256": mean("top").tolist(),
        "sizes": list(what.sizes),
        "pooling": {how: over(mean("pooling", how), layers[1:]) for how in POOLINGS},
        "shares": list(SHARES),
        "mapping": {how: over(mean("mapping", how), reusing) for how in MAPPINGS},
        "oracle": over_layers(mean("oracle"), layers),
    }
