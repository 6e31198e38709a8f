"""Loki's view of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.ops.types import describe, require
from longreach.plans import Plan

KIND = "loki"
HELP = "take another plan, or calibrate again (longreach calibrate loki)"


@dataclass(frozen=True, eq=False)
class LokiPlan:
    """Directions of the keys of each layer and KV head (those of all ranks), after rotation.

    basis: float [L, G, D, D], basis[l, g, :, i] a unit vector, by falling variance. variance: float [L, G, D], of keys
    along them. Raises InvalidInput where these do not fit each other.
    """

    basis: Tensor
    variance: Tensor

    def __post_init__(self) -> None:
        basis, variance = self.basis, self.variance
        square = isinstance(basis, Tensor) and basis.dim() == 4 and basis.shape[2] == basis.shape[3]
        ok = square and basis.is_floating_point()
        require(ok, f"basis: expected float [L, G, D, D], got {describe(basis)}; {HELP}")
        fits = isinstance(variance, Tensor) and variance.shape == basis.shape[:3] and variance.is_floating_point()
        require(fits, f"variance: expected float {list(basis.shape[:3])}, got {describe(variance)}; {HELP}")
        falling = bool((variance[..., 1:] <= variance[..., :-1] * 1.001).all()) and bool((variance >= 0).all())
        require(falling, f"variance: expected numbers >= 0 that fall from direction to direction, got others; {HELP}")
        long = float((torch.linalg.vector_norm(basis.double(), dim=2) - 1).abs().max())
        require(long < 0.01, f"basis: expected unit vectors, got lengths off by {long:.2g}; {HELP}")

    @classmethod
    def of(cls, plan: Plan) -> LokiPlan:
        """The view of a plan of kind "loki". Raises InvalidInput, naming the array that is missing or wrong."""
        require(plan.kind == KIND, f"expected a plan for {KIND}, got one for {plan.kind}; give the right file")
        for name in ("basis", "variance"):
            require(name in plan.arrays, f"the plan lacks the array {name!r}; {HELP}")
        found, model = cls(plan.arrays["basis"], plan.arrays["variance"]), plan.model
        shape = [model.layers, model.kv_heads, model.head_dim]
        require(
            list(found.variance.shape) == shape,
            f"basis: expected {shape} x D, got {describe(found.basis)}; {HELP}",
        )
        return found

    def arrays(self) -> dict[str, Tensor]:
        """As a plan holds it; `of` reads it back. Half precision: a score's error is below that of keys in bf16."""
        return {"basis": self.basis.half(), "variance": self.variance.float()}

    def explained(self, rank: int) -> Tensor:
        """The share of the variance that lies in the first `rank` directions: [L, G]."""
        return self.variance[..., :rank].sum(-1) / self.variance.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
