"""Reuse of attention spelled out: whole matrices of queries, keys and values, a row and a head at a time, in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longreach import attach
from longreach.evals.calibration.gather import DenseBeforeRotation
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall


class Layer:
    """One layer of a model over a prompt. q, before: [N, H, D] after and before rotation; k, v: [N, H, D]."""

    def __init__(self, call: LayerCall, tokens: int):
        assert call.pre_rope is not None
        self.q, self.before = call.rows.q.double(), call.pre_rope()[0].double()
        group = call.kv.group(call.rows)
        self.k, self.v = (
            x[0, :, :tokens].double().repeat_interleave(group, 0).transpose(0, 1) for x in (call.kv.k, call.kv.v)
        )
        self.scale = call.scale

    def logits(self, row: int, head: int) -> Tensor:
        return self.k[:, head] @ self.q[row, head] * self.scale

    def dense(self, row: int, head: int) -> Tensor:
        return self.logits(row, head)[: row + 1].softmax(0) @ self.v[: row + 1, head]

    def reusing(self, row: int, head: int, earlier: int, band: int, sinks: int) -> Tensor:
        """Eq. 7: the logits of keys in [sinks, earlier + 1 - band) are those of the earlier row."""
        mine, theirs = self.logits(row, head)[: row + 1], self.logits(earlier, head)
        stop = max(sinks, earlier + 1 - band)
        mine[sinks:stop] = theirs[sinks:stop]
        return mine.softmax(0) @ self.v[: row + 1, head]

    def error(self, row: int, head: int, earlier: int, band: int, sinks: int) -> float:
        whole = self.dense(row, head)
        return float((self.reusing(row, head, earlier, band, sinks) - whole).norm() / whole.norm())


@torch.no_grad()
def layers(model: Any, tokens: tuple[int, ...]) -> list[Layer]:
    found: list[Layer] = []

    def observe(phase: str, call: LayerCall, outcome: Outcome) -> None:
        found.append(Layer(call, len(tokens)))

    with attach(model, prefill=DenseBeforeRotation()) as session:
        session.on_layer = observe
        model(torch.tensor([tokens]), past_key_values=session.new_cache())
    return found
