"""When keys enter the hash tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = (5**0.5 - 1) / 2
MOST_TOKENS = 1 << 16  # sinks, local, seal, centre: with more, contexts of so many tokens would be read whole


@dataclass(frozen=True)
class Schedule:
    """It follows from the layer and the number of tokens, so chunks, batches and truncation do not change it.

    sinks: first keys, never in the tables. local: last keys, not in the tables. seal: keys enter in blocks of `seal`.
    centre: keys of the mean that is subtracted; no block enters before they have left `local`.
    Layers cut their blocks at different positions, so that they seal at different tokens: a decode step that seals in
    all layers takes several times as long as others. Only the first blocks enter all layers in the same steps.
    """

    sinks: int
    local: int
    seal: int
    centre: int

    @property
    def start(self) -> int:
        """The number of tokens at which the first block enters the tables."""
        return self.local + max(self.seal, self.sinks + self.centre)

    @property
    def step(self) -> int:
        """By how many positions each layer cuts before the last one, modulo `seal`: any number of layers is spread."""
        return round(self.seal * GOLDEN) | 1

    def stop(self, tokens: Tensor, layer: int) -> Tensor:
        """Keys [sinks, stop) of sequences of so many tokens are in a layer's tables; `sinks` if there are none."""
        return self.stops(tokens, range(layer, layer + 1))[0]

    def stops(self, tokens: Tensor, layers: range) -> Tensor:
        """`stop` of several layers, [layers, B].

        One block enters with the token that makes `start`, and one with each token after it until all complete blocks
        have: so a decode step never adds more than one block a row. The first block ends at position 1 to `seal`.
        """
        number = torch.arange(layers.start, layers.stop, device=tokens.device)[:, None]
        first = self.seal - number * self.step % self.seal
        complete = torch.div(tokens - self.local - first, self.seal, rounding_mode="floor")
        return (torch.minimum(complete, tokens - self.start) * self.seal + first).clamp(min=self.sinks)
