"""MAC in a model's compiled loop with hits that are forced: every head goes on from the row `back` rows back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longreach.bench.case import Case
from longreach.cache.ring import SPARE, RowRing
from longreach.errors import InvalidInput, OutOfMemory
from longreach.methods.call import LayerCall
from longreach.methods.mac import MAC
from longreach.methods.mac.state import LayerState

FORCED = (
    "Hits are forced, for timing alone: every row goes on from the row `back` rows back, whatever its query, and reads "
    "all after that row's band; the match looks through the whole ring all the same. The entries that the rows before "
    "the first step leave are empty, so that a step computes the model with a window of back + band keys, and is "
    "checked against that. How often heads would hit is no result."
)
RESERVED = 3 << 30  # bytes left for what a step makes


@dataclass(frozen=True)
class ForcedMAC(MAC):
    """MAC with forced hits: rings are pre-filled with empty entries, and every row reuses the row `back` positions
    earlier."""

    back: int = 350

    @torch.no_grad()
    def new_state(self, call: LayerCall, slots: int) -> LayerState:
        state = super().new_state(call, slots)
        assert isinstance(state, LayerState)
        ring, entries = state.ring, state.entries
        newest = call.kv.seq_lens.long() - 1
        before = newest[:, None] - 1 - torch.arange(ring.size, device=newest.device)
        ring.stamp[call.slots.long()[:, None], before % ring.size] = before.int()
        ring.query.normal_()
        ring.credit.zero_()
        entries.out.zero_()
        entries.lse.fill_(-torch.inf)
        state.force(self.back)
        return state


def forced(case: Case, steps: int) -> ForcedMAC:
    """The method of a case's first hits.

    steps: decode steps that run before the cache is cut back to the context. A cut does not bring back rows that they
    overwrote in the ring, and the first step after it reuses the row `gap` back: raises InvalidInput if that is gone.
    """
    assert case.reuse is not None
    window, context = case.reuse.window, case.shape.context
    gap, band = case.reuse.hits[0].span(case.shape, window)
    if gap + steps > window + SPARE or gap >= context:
        raise InvalidInput(
            f"{case.name}: {steps} steps with forced hits {gap} rows back need a context of more than {gap} tokens "
            f"and a window of at least {gap + steps - SPARE} rows; got a context of {context} and a window of {window}"
        )
    return ForcedMAC(window=case.reuse.window, band=band, min_context=0, back=gap)


def window(case: Case) -> int:
    """Keys that a row then reads."""
    assert case.reuse is not None
    return sum(case.reuse.hits[0].span(case.shape, case.reuse.window))


def as_many_as_fit(case: Case, device: torch.device) -> int:
    """Number of sequences whose keys, values and rings fit into free memory, with room to draw a layer's keys.

    On the CPU the case's own. Raises OutOfMemory where not even one fits.
    """
    shape, reuse, model = case.shape, case.reuse, case.model
    assert reuse is not None and model is not None
    if device.type != "cuda":
        return shape.batch
    dtype = getattr(torch, shape.dtype)
    ring = RowRing(1, shape.heads, shape.kv_heads, shape.dim, reuse.window, torch.empty(0, dtype=dtype))
    kv = 2 * shape.context * shape.kv_heads * shape.dim * dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] - RESERVED
    count = free // (model.layers * (kv + ring.bytes_per_sequence) + kv)
    if count < 1:
        raise OutOfMemory(f"{case.name}: not one sequence of {shape.context} tokens fits into {free / 2**30:.0f} GiB")
    return int(count)
