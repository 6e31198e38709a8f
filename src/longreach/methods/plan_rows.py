"""The last rows of prompts, kept for a plan that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.methods.base import PromptObserver
from longreach.methods.call import LayerCall
from longreach.methods.slots import LastRows


class RowsAndChanges(LastRows):
    """LastRows, and how much attention turned the residual stream of each row: fp32 [slots, size + 1]."""

    def __init__(self, call: LayerCall, size: int, slots: int):
        super().__init__(call, size, slots)
        self.change = torch.zeros(slots, size + 1, device=self.q.device)

    def snapshot(self) -> Callable[[], None]:
        rows, change = super().snapshot(), self.change.clone()

        def restore() -> None:
            rows()
            self.change.copy_(change)

        return restore

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> LastRows:
        new = super().select(slots, pages)
        assert isinstance(new, RowsAndChanges)
        with torch.inference_mode(False), torch.no_grad():
            new.change = self.change[slots]
        return new

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.change.nbytes

    def note_changes(self, slot: Tensor, pos: Tensor, change: Tensor) -> None:
        """slot, pos: int64 [r], sequences and positions of rows; older ones than are kept are dropped. change: [r]."""
        entry = pos % self.size
        entry = torch.where(self.pos[slot, entry] == pos, entry, self.size)
        self.change[slot, entry] = change.to(self.change)


@dataclass(frozen=True)
class PlanRows(PromptObserver):
    """Keeps the last `size` rows of prompts while a session waits for one to make a plan of."""

    size: int = 1

    name = "plan"
    keeps = "sequences"
    observes_prompt = True

    def new_state(self, call: LayerCall, slots: int) -> RowsAndChanges:
        return RowsAndChanges(call, self.size, slots)

    def observe_prompt(self, call: LayerCall, state: object) -> None:
        assert isinstance(state, RowsAndChanges)
        state.note(call)
