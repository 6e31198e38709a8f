"""Exact attention: the control every other method is held against."""

from __future__ import annotations

from dataclasses import dataclass

from longreach.cache import SequenceState
from longreach.methods.base import AttentionMethod, Outcome, attend_densely
from longreach.methods.call import LayerCall


@dataclass(frozen=True)
class Dense(AttentionMethod):
    """Every row attends to all it can see. Reads everything, keeps nothing."""

    name = "dense"
    phases = ("prefill", "decode")

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        return attend_densely(call)
