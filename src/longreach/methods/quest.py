"""Quest: blocks of keys, chosen by an upper bound of their scores (Tang et al., 2024, arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.cache import PerSlot, SequenceState
from longreach.errors import Unsupported
from longreach.methods.base import (
    AttentionMethod,
    LayerCall,
    ModelShape,
    Outcome,
    Reads,
    attend_densely,
    budget,
    check_budget,
    is_count,
)
from longreach.methods.choosing import check_layers, check_layers_of, most
from longreach.ops import KVView, Lists, Rows, Selection, Span, Spans, at, near
from longreach.ops.types import accumulator, require

AT_ONCE = 1 << 24  # numbers of keys that are gathered at a time where blocks of a prompt are bounded


@dataclass(frozen=True)
class Quest(AttentionMethod):
    """The blocks of keys whose bound says that they may score highest, and the newest block.

    For each block of `page` consecutive keys and KV head the least and the largest value of every channel are kept, of
    keys as they are in the cache, after rotation. A query's score with a key of the block is at most the sum over
    channels of max(q * least, q * largest). Under grouped queries (the paper has one query head a KV head) the bounds
    are summed over the query heads of a KV head, which share one list.

    k: the budget, a count of keys or a fraction of the row's context, rounded up to whole blocks; the newest block is
    always among them. page: keys in a block. dense_layers: layers that attend densely, the first two as in the paper.
    Reads, as metadata, the bounds of all blocks but the newest one, whose keys it reads to bound them anew.
    """

    k: int | float = 0.1
    page: int = 16
    dense_layers: tuple[int, ...] = (0, 1)

    name = "quest"
    phases = ("decode",)
    follows = True

    def __post_init__(self) -> None:
        check_budget("k", self.k)
        require(is_count(self.page, 1), f"page: expected a count of keys >= 1, got {self.page!r}")
        check_layers("dense_layers", self.dense_layers)

    def check(self, model: ModelShape) -> None:
        check_layers_of("dense_layers", self.dense_layers, model.layers)

    def new_state(self, call: LayerCall, slots: int) -> PerSlot | None:
        if call.layer in self.dense_layers:
            return None
        k = call.kv.k
        bound = (k.shape[3], k.dtype)
        return PerSlot(slots, k.shape[1], self.page, device=k.device, least=bound, largest=bound)

    def follow(self, call: LayerCall, state: SequenceState | None) -> tuple[Selection, ...]:
        if isinstance(state, PerSlot):
            self._note(call, state)
        return ()

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if not isinstance(state, PerSlot):
            return attend_densely(call, "in dense_layers")
        self._note(call, state)
        page = self._page(call)
        newest = call.rows.pos.long() // page
        bound = self._bounds(call, state).float()
        blocks = -(-budget(self.k, call.rows.pos.long() + 1) // page)
        index, count = call.top_k(
            bound, blocks[:, None].repeat(1, bound.shape[1]), newest + 1, last=1,
            capacity=-(-most(self.k, call.kv.capacity) // page),
        )  # fmt: skip
        chosen = Lists(index, count, block=page)
        bounded = Spans((Span(at((newest * page)[:, None]), near(1)),))
        pair = sum(state[name].shape[1] * state[name].shape[3] * state[name].element_size() for name in SIDES)
        return Outcome(call.attend(chosen), Reads((bounded, chosen), (chosen,), newest * pair))

    def _page(self, call: LayerCall) -> int:
        """Keys in a block; one longer than the sequences is as long as they can be: no slot past them is gathered."""
        return min(self.page, call.kv.capacity)

    def _bounds(self, call: LayerCall, state: PerSlot) -> Tensor:
        """At most this is the sum of a group's scores with any key of a block: [R, G, blocks], before the scale.

        The newest block's and those after it may be anything.
        """
        q = call.rows.q.to(accumulator(call.rows.q.dtype)).unflatten(1, (call.kv.heads, -1))  # [R, G, group, D]
        mine, blocks = call.slots[call.rows.seq.long()].long(), -(-call.kv.capacity // self._page(call))
        least, largest = (state[name][mine, :, :blocks].to(q.dtype) for name in SIDES)
        # max(q a, q b) for a <= b is q b where q > 0, else q a: two products, of the group's sums of either sign
        up, down = q.clamp(min=0).sum(2), q.clamp(max=0).sum(2)
        return (largest @ up[..., None] + least @ down[..., None])[..., 0]

    def _note(self, call: LayerCall, state: PerSlot) -> None:
        """Bound the blocks that hold the rows' keys, by all keys that the cache has of them."""
        if call.kv.slot_pos is not None:
            raise Unsupported("quest: after eviction a block holds other keys in each head; attend without evicting")
        state.fit(call.kv.capacity)
        page = self._page(call)
        seq, block = touched(call.rows, page)
        piece = max(1, AT_ONCE // (page * call.kv.heads * call.kv.k.shape[3]))
        with torch.inference_mode(False), torch.no_grad():
            for some, those in zip(seq.split(piece), block.split(piece), strict=True):
                slot = call.slots[some].long()
                for name, bound in zip(SIDES, bounds(call.kv, some, those, page), strict=True):
                    state[name][slot, :, those] = bound


SIDES = ("least", "largest")


def bounds(kv: KVView, seq: Tensor, block: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Least and largest value of each channel in the filled slots of blocks: two of [n, G, D]; seq, block: int [n]."""
    slot = block[:, None] * page + torch.arange(page, device=block.device)
    empty = (slot >= kv.filled[seq][:, None])[..., None, None]
    where, offset = kv.locate(seq[:, None], slot.clamp(max=kv.capacity - 1))
    k = kv.k[where.clamp(0, kv.k.shape[0] - 1), :, offset]  # [n, page, G, D]; a table's spare entries may be anything
    return k.masked_fill(empty, torch.inf).amin(1), k.masked_fill(empty, -torch.inf).amax(1)


def touched(rows: Rows, page: int) -> tuple[Tensor, Tensor]:
    """(sequence, block) of each block with a key of the rows, int64 [n]: once, where the host knows the rows' runs."""
    runs = rows.runs
    if runs is None or all(run.rows <= 1 for run in runs) or any(run.first is None for run in runs):
        return rows.seq.long(), rows.pos.long() // page
    seq, block = list[Tensor](), list[Tensor]()
    for run in runs:
        if run.rows and run.first is not None:
            ends = run.first // page, (run.first + run.rows - 1) // page + 1
            block.append(torch.arange(*ends, device=rows.pos.device))
            seq.append(torch.full_like(block[-1], run.seq))
    return torch.cat(seq), torch.cat(block)
