"""Fusion that chooses by where tokens stand, or recomputes none: FullReuse, PIE, LegoLink."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longreach.methods.base import is_count
from longreach.methods.slots import FullLayer, Fusion, PromptParts
from longreach.ops.types import require


@dataclass(frozen=True)
class FullReuse(Fusion):
    """Stored keys at the positions that they were computed at; only tokens that are not stored run (A3, section 2.2).

    The paper's own code reuses the question too and runs its last token alone; here the question runs, so that this
    scores far above the paper's.
    """

    name = "full_reuse"
    true_positions = False

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        return prompt.at[:0]


@dataclass(frozen=True)
class PIE(Fusion):
    """Stored keys at their true positions; only tokens that are not stored run (arXiv 2407.03157)."""

    name = "pie"

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        return prompt.at[:0]


@dataclass(frozen=True)
class LegoLink(Fusion):
    """The first and last tokens of each chunk are recomputed, from layer 0 (EPIC, arXiv 2410.15332).

    first: tokens at the beginning of each chunk.
    last: tokens at its end (EPIC has 0).
    """

    first: int = 20
    last: int = 20

    name = "legolink"

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            require(is_count(getattr(self, name)), f"{name}: expected a count >= 0, got {getattr(self, name)!r}")

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        ends = (prompt.before < self.first) | (prompt.after < self.last)
        return prompt.index(prompt.stored & ~prompt.exact & ends)
