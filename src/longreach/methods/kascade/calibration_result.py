"""The result of a calibration, and the plan made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longreach.methods.base import is_count
from longreach.methods.kascade.anchors import choose, fewest
from longreach.methods.kascade.plan import HELP, KascadePlan
from longreach.ops.types import describe, require
from longreach.plans import Plan

SERVED = 0.6  # chosen on longreach-mini: docs/plans.md


@dataclass(frozen=True, eq=False)
class CalibrationResult:
    """Means over prompts.

    layers: those of full attention, ascending, n of them. heads: fp64 [n, G, n, G], the share of their best weight
    that heads of later layers (last axes) find on the keys chosen by heads of earlier ones, the least over the tiles of
    a prompt; 1 where nothing was compared. importance: fp64 [L], how much each layer's attention turns the residual
    stream. ranks: of tensor parallelism: heads take the keys of heads on their own rank only. weighted: whether layers
    count by their importance when anchors are chosen, as in the paper, or equally.
    Raises InvalidInput for ranks that do not divide the heads.
    """

    layers: tuple[int, ...]
    heads: Tensor
    importance: Tensor
    ranks: int = 1
    weighted: bool = True

    def __post_init__(self) -> None:
        check_ranks(self.ranks, self.heads.shape[1])

    @classmethod
    def mean(cls, layers: Sequence[int], heads: Sequence[Tensor], importance: Sequence[Tensor]) -> CalibrationResult:
        """The mean over prompts; heads: [L, G, L, G] each, of all layers. Summed in the order of the prompts."""
        kept = torch.tensor(list(layers))
        return cls(tuple(layers), _mean(heads)[kept][:, :, kept], _mean(importance))

    @classmethod
    def of(cls, plan: Plan) -> CalibrationResult:
        """The result stored in a plan. Raises InvalidInput if the plan lacks it."""
        layers = KascadePlan.of(plan).layers
        n, kv = len(layers), plan.model.kv_heads
        found = []
        for name, shape in (("similarity", (n, kv, n, kv)), ("importance", (plan.model.layers,))):
            require(name in plan.arrays, f"the plan lacks the array {name!r}; {HELP}")
            x = plan.arrays[name]
            require(tuple(x.shape) == shape, f"array {name!r}: expected {list(shape)}, got {describe(x)}; {HELP}")
            found.append(x.double())
        heads, importance = found
        weighted = plan.values.get("weighted", True)
        require(isinstance(weighted, bool), f"weighted: expected true or false, got {weighted!r}; {HELP}")
        return cls(layers, heads, importance, plan.values.get("ranks", 1), weighted)

    def arrays(self) -> dict[str, Tensor]:
        """As a plan's arrays hold it; `of` reads it back."""
        return {"similarity": self.heads.float(), "importance": self.importance.float()}

    @cached_property
    def weights(self) -> Tensor:
        """fp64 [n]: the weights of the layers of full attention: their importance, or 1."""
        found = self.importance[torch.tensor(self.layers)]
        return found if self.weighted else torch.ones_like(found)

    @cached_property
    def within(self) -> Tensor:
        """`heads`, -1 where a head would take the keys of another rank's."""
        rank = torch.arange(self.heads.shape[1]) * self.ranks // self.heads.shape[1]
        return self.heads.masked_fill((rank[:, None] != rank)[None, :, None], -1.0)

    @cached_property
    def plain(self) -> Tensor:
        """fp64 [n, n]: the mean over a layer's heads of the best that a head of an earlier layer gives them; else 0."""
        return self.within.amax(1).mean(-1).triu()

    @cached_property
    def similarity(self) -> Tensor:
        """S of Algorithm 1, fp64 [n, n]: `plain`, each column times its layer's weight."""
        return self.plain * self.weights

    def best_heads(self, layer: int, anchor: int) -> tuple[int, ...]:
        """For each head of a layer, the head of the anchor that serves it best (both places in `layers`).

        Several heads may take the same one; of equals the lower is taken.
        """
        return tuple(int(given.argmax()) for given in self.within[anchor, :, layer].T)

    def head_map(self, anchors: Sequence[int]) -> list[tuple[int, ...]]:
        """[n][G]: `best_heads` of the last anchor at or before each layer; in anchors each head its own."""
        found, anchor = [], anchors[0]
        for layer in range(len(self.layers)):
            anchor = layer if layer in anchors else anchor
            own = tuple(range(self.heads.shape[1]))
            found.append(own if layer == anchor else self.best_heads(layer, anchor))
        return found

    def values(self, chosen: KascadePlan) -> dict[str, Any]:
        """A plan's values for this, as `KascadePlan.of` and `of` read them back."""
        return {**chosen.values(), "ranks": self.ranks, "weighted": self.weighted}

    def plan(self, budget: int | None, k: int, tile: int | None, served: float = SERVED) -> KascadePlan:
        """With the best `budget` anchors that Algorithm 1 finds.

        budget: None for the fewest that serve every layer with a share of `served` of its best weight (`fewest`).
        Raises InvalidInput for a budget that is no count of layers, or no share.
        """
        if budget is None:
            return self.with_anchors(fewest(self.similarity, self.plain, served).anchors, k, tile)
        return self.with_anchors(choose(self.similarity, budget).anchors, k, tile)

    def with_anchors(self, anchors: Sequence[int], k: int, tile: int | None) -> KascadePlan:
        """With these anchors (places in `layers`) and the best head map for them."""
        own = tuple(range(self.heads.shape[1]))
        rows = dict(zip(self.layers, self.head_map(anchors)))
        total = len(self.importance)
        return KascadePlan(
            anchors=tuple(self.layers[a] for a in anchors),
            head_map=tuple(rows.get(layer, own) for layer in range(total)),
            layers=self.layers,
            k=k,
            tile=tile,
        )


def _mean(prompts: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(prompts[0], dtype=torch.float64)
    for one in prompts:
        total += one
    return total / len(prompts)


def check_ranks(ranks: int, heads: int) -> None:
    """Raise InvalidInput unless `ranks` ranks hold equal parts of the KV heads."""
    require(
        is_count(ranks, 1) and heads % ranks == 0,
        f"ranks: expected a number that divides the {heads} KV heads, got {ranks!r}; choose another --ranks",
    )
