"""How far a method's attention is from dense attention on the same hidden states, layer by layer and head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longreach.methods.base import LayerCall, ModelShape, Outcome, Phase
from longreach.ops import Spans
from longreach.ops.attend import attend


class LayerErrors:
    """An observer of a session: relative errors |o - o_dense| / |o_dense| (norms over channels) of decode steps.

    The measure of MAC-Attention's Err(m): o and o_dense come from the same queries, keys and values, so errors of
    earlier layers do not count again. A layer where the method attends densely, as it says, has none.
    """

    def __init__(self, shape: ModelShape, device: torch.device):
        self.sums = torch.zeros(shape.layers, shape.query_heads, dtype=torch.float64, device=device)
        self.worst = torch.zeros_like(self.sums)
        self.rows = [0] * shape.layers

    def __call__(self, phase: Phase, call: LayerCall, outcome: Outcome) -> None:
        if phase != "decode":
            return
        rows = call.rows.q.shape[0]
        self.rows[call.layer] += rows
        if outcome.dense_because is None:
            errors = relative_errors(call, outcome)
            self.sums[call.layer] += errors.sum(0)
            self.worst[call.layer] = torch.maximum(self.worst[call.layer], errors.amax(0))

    def to_json(self) -> dict[str, Any]:
        """{"mean", "max"}: [layers][query heads], over all rows that were decoded."""
        rows = torch.tensor(self.rows, device=self.sums.device).clamp(min=1)[:, None]
        return {"mean": (self.sums / rows).tolist(), "max": self.worst.tolist()}


def relative_errors(call: LayerCall, outcome: Outcome) -> Tensor:
    """fp64 [R, H]; 0 where both are nothing."""
    dense = attend(
        call.rows, call.kv, Spans.dense(), scale=call.scale, softcap=call.softcap, sink_logit=call.sink_logit,
        impl=call.impl,
    )  # fmt: skip
    apart = (outcome.partial.out.double() - dense.out.double()).norm(dim=-1)
    size = dense.out.double().norm(dim=-1)
    return torch.where(apart == 0, 0.0, apart / size)
