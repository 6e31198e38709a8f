"""Fusion that chooses by each token's dependence on preceding text, measured when its chunk was stored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longreach.errors import InvalidInput
from longreach.methods.fusion.base import best_on_host, check_ratio
from longreach.methods.slots import FullLayer, Fusion, PromptParts


@dataclass(frozen=True)
class Dependence(Fusion):
    """Recompute the tokens with the largest change of keys and values when their chunk ran behind another one.

    Beyond the papers: each chunk is run a second time when it is stored, and the movement of its tokens in the
    middle layers is stored with it. So the choice needs no question, no probe and no layer that runs for all
    tokens, and is known before anything is loaded.

    ratio: of the whole prompt's tokens.
    """

    ratio: float = 0.15

    name = "dependence"
    needs_dependence = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        if prompt.dependence is None:
            raise InvalidInput(
                "dependence: the prompt has chunks that are not exact and were stored without dependence; precompute "
                "them with it (`longreach store add --dependence`, or Documents in a session with this method)"
            )
        return best_on_host(prompt.dependence, prompt, self.ratio)
