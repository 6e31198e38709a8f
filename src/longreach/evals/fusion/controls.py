"""Controls of fusion: choices and causality that tell what a method's own choice, and correct causality, are worth."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import UnknownName
from longreach.methods.base import AttentionMethod, Outcome, attend_densely, is_count
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.dense import Dense
from longreach.methods.fusion.base import best, check_ratio
from longreach.methods.registry import fusion_class
from longreach.methods.slots import FullLayer, Fusion, PromptParts
from longreach.ops import Rows
from longreach.ops.types import require


@dataclass(frozen=True)
class RandomChoice(Fusion):
    """Recompute tokens chosen at random, from layer 0. seed: which; prompts of other lengths get other ones."""

    ratio: float = 0.15
    seed: int = 0

    name = "random"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        require(is_count(self.seed), f"seed: expected a count >= 0, got {self.seed!r}")

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        name = hashlib.sha256(f"{self.seed}/{len(prompt.stored)}/{prompt.question}".encode())
        draw = torch.Generator().manual_seed(int.from_bytes(name.digest()[:7]))
        scores = torch.rand(len(prompt.stored), generator=draw)  # on the host: the same on every device
        return best(scores.to(prompt.device), prompt, self.ratio)


@dataclass(frozen=True)
class Oracle(Fusion):
    """Recompute the tokens whose keys and values in the middle layers a plain prefill changes most, from layer 0.

    It needs that plain prefill, so it saves nothing.
    """

    ratio: float = 0.15

    name = "oracle"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        raise AssertionError("the oracle chooses by a plain prefill: run what `resolved` makes of it")


@dataclass(frozen=True)
class RowOrder(Fusion):
    """A fusion method whose rows see keys by their order, as a mask that is causal from the bottom right gives them.

    The i-th of r rows sees the first n - r + i + 1 of n keys: recomputed rows see reused tokens behind them. So do
    CacheBlend's published code and others. of: the fusion method; ratio: its.
    """

    of: str = "cacheblend"
    ratio: float = 0.15

    name = "row_order"

    def __post_init__(self) -> None:
        if "ratio" not in fusion_class(self.of).options():
            raise UnknownName("fuse method with a ratio", self.of, ("cacheblend", "a3", "a3_deep"))
        self.method()

    def method(self) -> Fusion:
        """The fusion method itself."""
        return fusion_class(self.of).make(ratio=self.ratio)

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        raise AssertionError("row order is a matter of attention: run what `resolved` makes of it")


CONTROLS: dict[str, type[Fusion]] = {"random": RandomChoice, "oracle": Oracle, "row_order": RowOrder}


@dataclass(frozen=True, eq=False)
class ByScore(Fusion):
    """Recompute the tokens with the largest of the given scores [N]."""

    scores: Tensor
    ratio: float

    name = "by_score"

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        return best(self.scores, prompt, self.ratio)


@dataclass(frozen=True, eq=False)
class Noted(Fusion):
    """A fusion method whose choices are appended to `choices`."""

    of: Fusion
    choices: list[Tensor]

    name = "noted"

    def __post_init__(self) -> None:
        names = ("full_layers", "true_positions", "needs_dependence", "compares_values")
        for name in names:  # of the class elsewhere, here of `of`
            object.__setattr__(self, name, getattr(self.of, name))

    def probes(self, model: ModelShape) -> tuple[int, ...]:
        return self.of.probes(model)

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        chosen = self.of.choose(prompt, layer)
        self.choices.append(chosen)
        return chosen


@dataclass(frozen=True)
class ByRowOrder(AttentionMethod):
    """Dense attention with causality by the rows' order, of one sequence."""

    name = "by_row_order"
    phases = ("prefill",)

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        q, seq, rows = call.rows.q, call.rows.seq, len(call.rows.pos)
        pos = call.kv.seq_lens.long()[seq.long()] - rows + torch.arange(rows, device=q.device)
        return attend_densely(replace(call, rows=Rows(q, seq, pos)))


def resolved(fusion: Fusion, moved: Callable[[], Tensor]) -> tuple[Fusion, AttentionMethod]:
    """The fusion and prefill method that a session runs for `fusion`. moved: as `Oracle` needs it, [N]."""
    if isinstance(fusion, Oracle):
        return ByScore(moved(), fusion.ratio), Dense()
    if isinstance(fusion, RowOrder):
        return fusion.method(), ByRowOrder()
    return fusion, Dense()
