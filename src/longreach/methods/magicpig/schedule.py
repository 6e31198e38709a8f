"""When keys enter the hash tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_TOKENS = 1 << 16  # sinks, local, seal, centre: with more, contexts of so many tokens would be read whole


@dataclass(frozen=True)
class Schedule:
    """It follows from the number of tokens alone, so chunks, batches and truncation do not change it.

    sinks: first keys, never in the tables. local: last keys, not in the tables. seal: keys enter in blocks of `seal`,
    cut at multiples of it. centre: keys of the mean that is subtracted; no block enters before they have left `local`.
    """

    sinks: int
    local: int
    seal: int
    centre: int

    @property
    def start(self) -> int:
        """The number of tokens at which the first block enters the tables."""
        return self.local + max(self.seal, self.sinks + self.centre)

    def stop(self, tokens: Tensor) -> Tensor:
        """Keys [sinks, stop) of sequences of so many tokens are in the tables; `sinks` if there are none.

        One block enters with the token that makes `start`, and one with each token after it until all complete blocks
        have: so a decode step never adds more than one block a row.
        """
        complete = torch.div(tokens - self.local, self.seal, rounding_mode="floor")
        return torch.minimum(complete, tokens - self.start + 1).mul(self.seal).clamp(min=self.sinks)
