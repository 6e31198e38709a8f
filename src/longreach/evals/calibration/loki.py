"""Loki's calibration: how the keys of every layer and head vary, after rotation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from longreach.evals.calibration.base import Calibration, PlanContent
from longreach.evals.calibration.gather import Gather, packed, unpacked
from longreach.evals.calibration.prompts import Prompt
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.loki.calibrate import Moments, moments_of, principal, together
from longreach.methods.loki.plan import LokiPlan

if TYPE_CHECKING:
    from longreach.evals.calibration.run import CalibrationRun


class LokiGather(Gather):
    """For each prompt: its number of keys, their means [L, G, D] and the upper halves of their covariances."""

    def __init__(self, shape: ModelShape):
        self.shape = shape

    def begin(self, prompt: Prompt) -> None:
        self._found: list[list[Moments]] = [[] for _ in range(self.shape.layers)]

    def layer(self, call: LayerCall, outcome: Outcome) -> None:
        page, offset = call.kv.locate(call.rows.seq.long(), call.rows.pos.long())
        mine = self._found[call.layer]
        shape = self.shape.kv_heads, self.shape.head_dim
        mine.append(moments_of(shape, call.kv.k[page, :, offset]))
        mine[:] = [together(mine)]

    def finish(self) -> dict[str, Any]:
        layers = [one for (one,) in self._found]
        mean, product = (torch.stack(x) for x in (([m.mean for m in layers]), [m.product for m in layers]))
        covariance = product - mean[..., :, None] * mean[..., None, :]
        upper = torch.triu_indices(*covariance.shape[-2:])
        return {"keys": layers[0].keys, "mean": packed(mean), "covariance": packed(covariance[..., *upper].float())}


def calibrated(parts: Sequence[Any]) -> LokiPlan:
    """The directions that the keys of all prompts together vary most in."""
    basis, variance = principal(together([_moments(part) for part in parts]))
    return LokiPlan(basis.float(), variance.float())


def _moments(part: Any) -> Moments:
    mean, half = unpacked(part["mean"]), unpacked(part["covariance"]).double()
    dim = mean.shape[-1]
    row, column = torch.triu_indices(dim, dim)
    covariance = mean.new_zeros((*mean.shape, dim))
    covariance[..., row, column] = half
    covariance[..., column, row] = half
    return Moments(part["keys"], mean, covariance + mean[..., :, None] * mean[..., None, :])


@dataclass(frozen=True)
class LokiCalibration(Calibration):
    """Directions for Loki, in which the keys of each layer and head vary most. It has no options."""

    kind: ClassVar[str] = "loki"

    def least_tokens(self, shape: ModelShape) -> int:
        return 2

    def make(self, run: CalibrationRun) -> PlanContent:
        return PlanContent({}, calibrated(run.gather(LokiGather(run.shape))).arrays())
