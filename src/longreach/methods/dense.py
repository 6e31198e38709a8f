"""Exact attention: the reference for every other method."""

from __future__ import annotations

from dataclasses import dataclass

from longreach.cache import SequenceState
from longreach.methods.base import AttentionMethod, Outcome, attend_densely
from longreach.methods.call import LayerCall


@dataclass(frozen=True)
class Dense(AttentionMethod):
    """Every row attends to all keys visible to it. It keeps no state."""

    name = "dense"
    phases = ("prefill", "decode")

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        return attend_densely(call)
