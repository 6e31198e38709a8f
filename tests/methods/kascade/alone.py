"""Kascade once more, as the paper says it: fp64, a loop over every row and head. It shares no code with the method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from tests.methods.drive import HEADS, KV_HEADS, LAYERS, LOGITS, SCALE, Text

GROUP = HEADS // KV_HEADS


@dataclass
class Alone:
    """Options as the method's; maps: layer -> the heads of its anchor; tile: rows, the group counted.

    chosen[l][r][g]: the keys that a row attends to in a layer, ascending.
    """

    anchors: Sequence[int]
    maps: dict[int, Sequence[int]] = field(default_factory=dict)
    k: float = 0.1
    min_keys: int = 128
    all_heads: bool = False
    sinks: int = 0
    recent: int = 1
    dense_below: int = 0
    dense_layers: Sequence[int] = ()
    tile: int = 8

    def keys(self, available: int, context: int) -> int:
        if context < self.dense_below:
            return available
        if isinstance(self.k, int):
            return min(self.k, available)
        return min(max(math.floor(self.k * available + 1e-9), self.min_keys), available)

    def answer(self, text: Text, chunks: Sequence[int], steps: int) -> Tensor:
        """[L, N, H, D]: a prompt read in chunks, then steps of one token."""
        self.chosen: list[list[list[list[int]]]] = []
        out = torch.zeros(text.q.shape, dtype=torch.float64)
        prompt = sum(chunks)
        starts = [sum(chunks[:n]) for n in range(len(chunks))]
        for layer in range(LAYERS):
            self.chosen.append([])
            for row in range(prompt + steps):
                chunk = [(a, a + n) for a, n in zip(starts, chunks, strict=True) if a <= row < a + n]
                sets = [self.attended(text, layer, row, chunk[0] if chunk else None, g) for g in range(KV_HEADS)]
                self.chosen[layer].append(sets)
                for head in range(HEADS):
                    seen = list(range(row + 1)) if self.dense(layer) else sets[head // GROUP]
                    p = weights(text, layer, row, head, seen)
                    values = text.v[layer, seen, head // GROUP].double()
                    out[layer, row, head] = torch.tensor(p, dtype=torch.float64) @ values
        return out

    def dense(self, layer: int) -> bool:
        return layer == self.anchors[0] or layer in self.dense_layers

    def attended(self, text: Text, layer: int, row: int, chunk: tuple[int, int] | None, head: int) -> list[int]:
        anchor = max(a for a in self.anchors if a <= layer)
        if anchor != layer:
            head = head if self.all_heads else self.maps.get(layer, range(KV_HEADS))[head]
            return self.chosen[anchor][row][head]
        heads = range(HEADS) if self.all_heads else range(head * GROUP, (head + 1) * GROUP)
        if chunk is None:
            length, first_newest = row + 1, row + 1 - self.recent
            count, rows, own = self.keys(length, length), [row], []
        else:
            tokens = max(1, self.tile // GROUP)
            length = row // tokens * tokens
            count = self.keys(length, length + 1)
            rows = [r for r in range(length, length + tokens) if chunk[0] <= r < chunk[1]]
            own, first_newest = list(range(length, row + 1)), length - (self.recent - 1)
        score = [0.0] * length
        for r in rows:
            for h in heads:
                for n, p in enumerate(weights(text, layer, r, h, list(range(r + 1)))[:length]):
                    score[n] += p
        order = sorted(range(length), key=lambda n: (not (n < self.sinks or n >= first_newest), -score[n], n))
        return sorted(order[:count]) + own


def weights(text: Text, layer: int, row: int, head: int, seen: list[int]) -> list[float]:
    """The probabilities of keys, beside the sink's."""
    found = torch.tensor(logits(text, layer)[row][head], dtype=torch.float64)[seen].exp()
    sink = LOGITS[layer].get("sink_logit")
    return (found / (found.sum() + (0.0 if sink is None else math.exp(float(sink[head]))))).tolist()


@lru_cache(maxsize=2 * LAYERS)
def logits(text: Text, layer: int) -> list[list[list[float]]]:
    """[row][head][key], causality aside."""
    cap, found = LOGITS[layer].get("softcap"), []
    for q in text.q[layer].double():
        heads = [SCALE * (text.k[layer, :, h // GROUP].double() @ q[h]) for h in range(HEADS)]
        found.append([[x if cap is None else cap * math.tanh(x / cap) for x in row.tolist()] for row in heads])
    return found
