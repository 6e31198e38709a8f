"""What a fusion method is: a frozen config that says which tokens of stored chunks are recomputed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longreach.methods.base import Configured
from longreach.methods.call import LayerCall
from longreach.ops.types import require


@dataclass(frozen=True, eq=False)
class PromptParts:
    """Which tokens of a prompt of N have stored keys and values. All [N] on the model's device.

    stored: bool. exact: bool, the stored ones that are what a plain prefill makes, since all before their chunk is what
    it was computed behind. before, after: int64, tokens of the same chunk before and after this one; 0 outside chunks.
    question: the first token after the last chunk.
    """

    stored: Tensor
    exact: Tensor
    before: Tensor
    after: Tensor
    question: int

    @property
    def candidates(self) -> Tensor:
        """bool [N]: the tokens that a ratio may be spent on."""
        return self.stored & ~self.exact


@dataclass(frozen=True, eq=False)
class FullLayer:
    """A layer in which tokens are chosen.

    call: the question's rows over the keys of all tokens, which are in the cache. values: [N, G, D], computed for all
    tokens; in a probe of no rows. stored_values: makes those of the chunks, [S, G, D], S the stored tokens in ascending
    order.
    """

    call: LayerCall
    values: Tensor
    stored_values: Callable[[], Tensor]


@dataclass(frozen=True)
class Fusion(Configured, ABC):
    """Base of methods that fill the fuse slot. Subclasses are frozen dataclasses of options.

    full_layers: layers that run for all tokens before tokens are chosen. At the last one keys and values of all tokens
        replace the stored ones; chosen tokens alone attend there and run from there on. 0: they run from the start.
    true_positions: whether stored keys are rotated to where their tokens stand, else to where they were computed.
    """

    full_layers: ClassVar[int] = 0
    true_positions: ClassVar[bool] = True

    def probes(self, layers: int) -> tuple[int, ...]:
        """Layers up to which the question runs to choose, one after the other; none for methods that do without.

        Raises InvalidInput for an option that does not fit a model of so many layers.
        """
        return ()

    @abstractmethod
    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        """bool [N]: the stored tokens that are recomputed. layer: the last full one or the probe's; else None."""


def check_ratio(ratio: object) -> None:
    """Raise InvalidInput unless `ratio` is a number in [0, 1]."""
    number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
    require(number and 0 <= ratio <= 1, f"ratio: expected a number in [0, 1], got {ratio!r}")  # type: ignore[operator]


def best(scores: Tensor, prompt: PromptParts, ratio: float) -> Tensor:
    """bool [N]: the round(ratio N) candidates with the largest scores [N], all where there are fewer; ties go to the
    earlier."""
    candidates = prompt.candidates
    ranked = scores.double().masked_fill(~candidates, -torch.inf).sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(candidates)
    chosen[ranked[: round(ratio * len(candidates))]] = True
    return chosen & candidates
