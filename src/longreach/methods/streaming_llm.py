"""StreamingLLM: attention sinks and a recent window (Xiao et al., 2024)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from longreach.cache import SequenceState
from longreach.methods.base import AttentionMethod, Outcome, budget, check_budget, is_count
from longreach.methods.call import LayerCall, ModelShape
from longreach.ops import Span, Spans, absolute, relative
from longreach.ops.types import require


@dataclass(frozen=True)
class StreamingLLM(AttentionMethod):
    """Attention to the first `sinks` tokens and the last `window` tokens.

    sinks: a count.
    window: a count, or a fraction of the row's context (the Kascade paper compares with 0.3).

    Tokens between sinks and window are never read. Keys keep their true positions. The paper renumbers them inside
    its cache to run past the trained length; here the context stays within it.
    """

    sinks: int = 4
    window: int | float = 0.3

    name = "streaming_llm"
    phases = ("prefill", "decode")

    def __post_init__(self) -> None:
        require(is_count(self.sinks), f"sinks: expected a count, got {self.sinks!r}")
        check_budget("window", self.window)

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        return Outcome(call.attend(call.once(self, lambda: self._kept(call))))

    def whole_layers(self, model: ModelShape, dtype: torch.dtype) -> Collection[int]:
        return ()

    def _kept(self, call: LayerCall) -> Spans:
        width = budget(self.window, call.context)[:, None]
        return Spans((Span(absolute(0), absolute(self.sinks)), Span(relative(1 - width), relative(1))))
