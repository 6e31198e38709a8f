"""A3Deep's view of a plan: how good each layer's choice of tokens is, and the layer that chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longreach.methods.base import is_count
from longreach.ops.types import require
from longreach.plans import Plan

KIND = "a3_deep"
HELP = "take another plan, or calibrate again (longreach calibrate a3_deep)"


@dataclass(frozen=True)
class A3DeepPlan:
    """The layer in which a question chooses, and the measurements of all layers that were tried.

    layer: the one that chooses. layers: those that were tried, ascending. ratio: share of a prompt's tokens that was
    recomputed. kl: of each tried layer, mean over prompts of KL(exact || fused) of the next-token distributions along
    the correct answer, in nats. hits: of each, mean share of the oracle's tokens that it chose too; the oracle takes
    the tokens whose keys and values an exact prefill changes most. Raises InvalidInput if these do not fit each other.
    """

    layer: int
    layers: tuple[int, ...]
    ratio: float
    kl: tuple[float, ...]
    hits: tuple[float, ...]

    def __post_init__(self) -> None:
        numbers = all(is_count(n) for n in self.layers) and list(self.layers) == sorted(set(self.layers))
        require(bool(self.layers) and numbers, f"layers: expected ascending layer numbers, got {self.layers}; {HELP}")
        require(
            is_count(self.layer) and self.layer in self.layers,
            f"layer: expected one of {', '.join(map(str, self.layers))}, got {self.layer!r}; {HELP}",
        )
        require(_within((self.ratio,), 1), f"ratio: expected a number in [0, 1], got {self.ratio!r}; {HELP}")
        for name, most in (("kl", math.inf), ("hits", 1)):
            found = getattr(self, name)
            require(
                len(found) == len(self.layers) and _within(found, most),
                f"{name}: expected {len(self.layers)} numbers in [0, {most}], got {list(found)}; {HELP}",
            )

    @classmethod
    def of_parts(cls, parts: Sequence[Mapping[str, Any]], layers: Sequence[int], ratio: float) -> A3DeepPlan:
        """The plan that prompts give: the layer of the least mean KL, the lowest of equals.

        parts: of each prompt {"kl", "hits"}, a number for each of `layers`.
        """
        kl, hits = (
            tuple(sum(column) / len(parts) for column in zip(*(part[name] for part in parts), strict=True))
            for name in ("kl", "hits")
        )
        return cls(min(zip(kl, layers, strict=True))[1], tuple(layers), ratio, kl, hits)

    @classmethod
    def of(cls, plan: Plan) -> A3DeepPlan:
        """The view of a plan of kind "a3_deep". Raises InvalidInput, naming the value that is missing or wrong."""
        require(plan.kind == KIND, f"expected a plan for {KIND}, got one for {plan.kind}; give the right file")
        values = plan.values
        for name in ("layer", "layers", "ratio", "kl", "hits"):
            require(name in values, f"the plan lacks the value {name!r}; {HELP}")
        for name in ("layers", "kl", "hits"):
            require(isinstance(values[name], list), f"{name}: expected a list, got {values[name]!r}; {HELP}")
        lists = {name: tuple(values[name]) for name in ("layers", "kl", "hits")}
        found = cls(layer=values["layer"], ratio=values["ratio"], **lists)
        last = plan.model.layers - 1
        require(found.layers[-1] <= last, f"layers: expected layers from 0 to {last}, got {found.layers[-1]}; {HELP}")
        return found

    def values(self) -> dict[str, Any]:
        """As a plan holds it; `of` reads it back."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}


def _within(numbers: Sequence[Any], most: float) -> bool:
    return all(isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x <= most for x in numbers)
