"""MAC's view of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from longreach.methods.base import is_count
from longreach.ops.types import describe, require
from longreach.plans import Plan

KIND = "mac"
Scale = Literal["sqrt2d", "calibrated"]
SCALES: tuple[Scale, ...] = get_args(Scale)
MOST = 1 << 24  # windows, bands and other numbers of tokens are below it
HELP = "take another plan, or calibrate again (longreach calibrate mac)"


@dataclass(frozen=True, eq=False)
class MACPlan:
    """One entry a layer of each.

    window: rows searched. band: last keys that are always read; None if no tried band is wide enough, then the layer
    reuses nothing. tau: the threshold under each scale.
    energy: float [L, G, D], mean square of each channel of the keys before rotation (KV heads of all ranks), the same
    for both channels that turn together. sinks: first tokens whose weight the bands leave out, for no entry holds them.
    Raises InvalidInput where these do not fit each other.
    """

    window: tuple[int, ...]
    band: tuple[int | None, ...]
    tau: Mapping[Scale, tuple[float, ...]]
    energy: Tensor
    sinks: int

    def __post_init__(self) -> None:
        energy = self.energy
        ok = isinstance(energy, Tensor) and energy.dim() == 3 and energy.is_floating_point()
        require(ok, f"energy: expected float [L, G, D], got {describe(energy)}; {HELP}")
        require(bool((energy >= 0).all()), f"energy: expected numbers >= 0, got {float(energy.min())}; {HELP}")
        layers = energy.shape[0]
        require(set(self.tau) == set(SCALES), f"tau: expected one for each of {', '.join(SCALES)}, got others; {HELP}")
        taus = ((f"tau.{scale}", self.tau[scale]) for scale in SCALES)
        for name, values in (("window", self.window), ("band", self.band), *taus):
            fits = isinstance(values, tuple) and len(values) == layers
            require(fits, f"{name}: expected one number for each of {layers} layers, got {values!r}; {HELP}")
        fits = is_count(self.sinks) and self.sinks < MOST
        require(fits, f"sinks: expected a count in [0, {MOST}), got {self.sinks!r}; {HELP}")
        for n in self.window:
            require(_fits(n), f"window: expected counts in [1, {MOST}), got {n!r}; {HELP}")
        for band in self.band:
            require(band is None or _fits(band), f"band: expected counts in [1, {MOST}) or null, got {band!r}; {HELP}")
        for scale in SCALES:
            for tau in self.tau[scale]:
                ok = isinstance(tau, (int, float)) and not isinstance(tau, bool) and 0 <= tau < 1
                require(ok, f"tau.{scale}: expected numbers in [0, 1), got {tau!r}; {HELP}")

    @classmethod
    def of(cls, plan: Plan) -> MACPlan:
        """The view of a plan of kind "mac". Raises InvalidInput, naming what is missing or wrong."""
        require(plan.kind == KIND, f"expected a plan for {KIND}, got one for {plan.kind}; give the right file")
        for name in ("window", "band", "tau", "sinks"):
            require(name in plan.values, f"the plan lacks the value {name!r}; {HELP}")
        require("energy" in plan.arrays, f"the plan lacks the array 'energy'; {HELP}")
        tau = plan.values["tau"]
        require(isinstance(tau, Mapping), f"tau: expected an object, got {tau!r}; {HELP}")
        found = cls(
            _tuple(plan.values["window"]),
            _tuple(plan.values["band"]),
            {name: _tuple(values) for name, values in tau.items()},
            plan.arrays["energy"],
            plan.values["sinks"],
        )
        shape = [plan.model.layers, plan.model.kv_heads, plan.model.head_dim]
        right = list(found.energy.shape) == shape
        require(right, f"energy: expected {shape}, got {describe(found.energy)}; {HELP}")
        return found

    def values(self) -> dict[str, Any]:
        """As a plan's values hold it; `of` reads it back."""
        tau = {name: list(values) for name, values in self.tau.items()}
        return {"window": list(self.window), "band": list(self.band), "tau": tau, "sinks": self.sinks}

    def arrays(self) -> dict[str, Tensor]:
        """As a plan's arrays hold it."""
        return {"energy": self.energy.to(torch.float32)}


def _fits(value: object) -> bool:
    return is_count(value, 1) and isinstance(value, int) and value < MOST


def _tuple(values: object) -> Any:
    return tuple(values) if isinstance(values, list) else values
