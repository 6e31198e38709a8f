"""Error of a method's attention against dense attention on the same hidden states, by layer and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape, Phase
from longreach.ops import Spans
from longreach.ops.attend import attend

SAMPLED = 256  # rows of a prompt


class LayerErrors:
    """An observer of a session: relative errors |o - o_dense| / |o_dense| (norms over channels) of rows of a phase.

    The measure of MAC-Attention's Err(m): o and o_dense come from the same queries, keys and values, so errors of
    earlier layers do not count again. A layer with a dense reason has none.
    positions: bool [tokens], the rows that are measured; None for all.
    """

    def __init__(self, shape: ModelShape, device: torch.device, phase: Phase, positions: Tensor | None = None):
        self.phase, self.positions = phase, positions
        self.sums = torch.zeros(shape.layers, shape.query_heads, dtype=torch.float64, device=device)
        self.worst = torch.zeros_like(self.sums)
        self.rows = [0] * shape.layers

    def __call__(self, phase: Phase, call: LayerCall, outcome: Outcome) -> None:
        if phase != self.phase:
            return
        rows, out = call.rows, outcome.partial.out
        if self.positions is not None:
            index = self.positions[rows.pos.long()].nonzero().flatten()
            rows, out = rows.take(index), out[index]
        if not len(out):
            return
        self.rows[call.layer] += len(out)
        if outcome.dense_reason is None:
            dense = attend(
                rows, call.kv, Spans.dense(), scale=call.scale, softcap=call.softcap, sink_logit=call.sink_logit,
                impl=call.impl,
            )  # fmt: skip
            errors = relative_errors(out, dense.out)
            self.sums[call.layer] += errors.sum(0)
            self.worst[call.layer] = torch.maximum(self.worst[call.layer], errors.amax(0))

    def to_json(self) -> dict[str, Any]:
        """{"mean", "max": [layers][query heads] over the rows measured, "rows": how many}."""
        rows = torch.tensor(self.rows, device=self.sums.device).clamp(min=1)[:, None]
        return {"mean": (self.sums / rows).tolist(), "max": self.worst.tolist(), "rows": max(self.rows)}


def sample(tokens: int, device: torch.device) -> Tensor:
    """bool [tokens]: at most SAMPLED of a prompt's rows, evenly spaced, its last among them."""
    some = min(SAMPLED, tokens)
    chosen = torch.zeros(tokens, dtype=torch.bool, device=device)
    chosen[[-(-tokens * (n + 1) // some) - 1 for n in range(some)]] = True
    return chosen


def relative_errors(out: Tensor, dense: Tensor) -> Tensor:
    """fp64 [R, H] of outputs [R, H, D]; 0 where both are nothing."""
    apart = (out.double() - dense.double()).norm(dim=-1)
    return torch.where(apart == 0, 0.0, apart / dense.double().norm(dim=-1))
