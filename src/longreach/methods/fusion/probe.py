"""Fusion that chooses by the question's attention in a middle layer, over stored keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longreach.methods.base import check_plan_name, is_count
from longreach.methods.call import ModelShape
from longreach.methods.fusion.base import best, check_ratio
from longreach.methods.fusion.plan import KIND, A3DeepPlan
from longreach.methods.fusion.scores import attention_by_head
from longreach.methods.slots import FullLayer, Fusion, PromptParts
from longreach.ops.types import require
from longreach.plans import find


@dataclass(frozen=True)
class A3Deep(Fusion):
    """Recompute the tokens that the question attends to most in a middle layer; no layer runs for all tokens.

    Beyond the paper (arXiv 2511.17560; its App. C finds that the second layer may be too early): first the question
    alone runs, over stored keys at their true positions, up to `layer` and chooses there; then the chosen tokens
    run from layer 0.

    ratio: of the whole prompt's tokens.
    layer: None for the plan's, or a third of the depth without a plan.
    rounds: how often it chooses; from the second time on the tokens chosen before run with the question.
    plan: a file made by `longreach calibrate a3_deep`, else None.

    Raises InvalidInput for both a layer and a plan.
    """

    ratio: float = 0.15
    layer: int | None = None
    rounds: int = 1
    plan: str | None = None

    name = "a3_deep"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        require(self.layer is None or is_count(self.layer), f"layer: expected a layer's number, got {self.layer!r}")
        require(is_count(self.rounds, 1), f"rounds: expected a count >= 1, got {self.rounds!r}")
        check_plan_name(self.plan)
        require(
            self.layer is None or self.plan is None,
            f"layer={self.layer} and plan={self.plan!r}: the plan sets the layer; give only one of the two",
        )

    def probes(self, model: ModelShape) -> tuple[int, ...]:
        if self.plan is not None:
            return (A3DeepPlan.of(find(KIND, self.plan, model)).layer,) * self.rounds
        layers = model.layers
        at = layers // 3 if self.layer is None else self.layer
        require(at < layers, f"layer: expected a layer of the model, which has {layers} (0 to {layers - 1}), got {at}")
        return (at,) * self.rounds

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        assert layer is not None
        return best(attention_by_head(prompt, layer.call), prompt, self.ratio)
