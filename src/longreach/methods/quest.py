"""Quest: blocks of keys chosen by an upper bound of their scores (Tang et al., 2024, arXiv 2406.10774)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.cache import PerTokenState, SequenceState
from longreach.methods.base import AttentionMethod, Outcome, attend_densely, budget, check_budget, is_count
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.choosing import check_layers, check_layers_of, max_keys
from longreach.ops import KVView, Lists, Rows, Span, Spans, absolute, relative
from longreach.ops.block_bounds import bound_blocks
from longreach.ops.doors import Read
from longreach.ops.types import require


@dataclass(frozen=True)
class Quest(AttentionMethod):
    """Attention to the blocks of keys with the highest score bounds, and to the newest block.

    The state keeps the least and the largest value of every channel for each block of `page` consecutive keys and KV
    head, of keys after rotation. A query's score with a key of the block is at most the sum over channels of
    max(q * least, q * largest). With grouped queries (the paper has one query head per KV head) the bounds are summed
    over the query heads of a KV head, which share one list.

    k: the budget, a count of keys or a fraction of the row's context, rounded up to whole blocks, the newest
        included.
    page: keys in a block.
    dense_layers: layers that attend densely, as in the paper the first two.

    Metadata read: the bounds of all blocks but the newest. The newest block's keys are read to update its bounds.
    """

    k: int | float = 0.1
    page: int = 16
    dense_layers: tuple[int, ...] = (0, 1)

    name = "quest"
    phases = ("decode",)
    keeps = "tokens"
    observes_prompt = True

    def __post_init__(self) -> None:
        check_budget("k", self.k)
        require(is_count(self.page, 1), f"page: expected a count of keys >= 1, got {self.page!r}")
        check_layers("dense_layers", self.dense_layers)

    def check(self, model: ModelShape) -> None:
        check_layers_of("dense_layers", self.dense_layers, model.layers)

    def new_state(self, call: LayerCall, slots: int) -> BlockBounds | None:
        return None if call.layer in self.dense_layers else BlockBounds(call.kv, self.page)

    def observe_prompt(self, call: LayerCall, state: SequenceState | None) -> None:
        if isinstance(state, BlockBounds):
            state.ensure_capacity(call.kv)
            state.note(call.kv, *touched(call.rows, self._block(call)))

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if not isinstance(state, BlockBounds):
            return attend_densely(call, "in dense_layers")
        state.ensure_capacity(call.kv)
        page = self._block(call)
        blocks, newest, bounded = call.once(self, lambda: self._blocks(call))
        call.count_read(Read.of(call.kv, bounded, values=False))
        call.read_bytes(call.once((self, "bytes"), lambda: newest * state.bytes_of_block))
        bound = call.op("bound_and_score", state["low"], state["high"], self.page)
        count = call.once((self, "count"), lambda: blocks[:, None].repeat(1, bound.shape[1]))
        length = call.once((self, "length"), lambda: newest + 1)
        capacity = -(-max_keys(self.k, call.kv.capacity) // page)
        index, used = call.op("top_k", bound.float(), count, length, last=1, capacity=capacity)
        return Outcome(call.attend(Lists(index, used, block=page, all_visible=True)))

    def whole_layers(self, model: ModelShape, dtype: torch.dtype) -> Collection[int]:
        return self.dense_layers

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        blocks, listed = -(-capacity // self.page), -(-max_keys(self.k, capacity) // self.page)
        return 4 * rows * model.kv_heads * (blocks + listed + 1)

    def _blocks(self, call: LayerCall) -> tuple[Tensor, Tensor, Spans]:
        """For each row: number of blocks to choose, the newest block, and the span of keys that updates its bounds."""
        page = self._block(call)
        newest = call.rows.pos.long() // page
        bounded = Spans((Span(absolute((newest * page)[:, None]), relative(1)),))
        return -(-budget(self.k, call.context) // page), newest, bounded

    def _block(self, call: LayerCall) -> int:
        """Keys in a block, at most the capacity of a sequence."""
        return min(self.page, call.kv.capacity)


class BlockBounds(PerTokenState):
    """Least and largest value of every channel of each block of `per` keys: ["low"], ["high"], [P, G, units, D]."""

    def __init__(self, kv: KVView, per: int):
        bound = (kv.k.shape[3], kv.k.dtype)
        super().__init__(kv, per, low=bound, high=bound)

    @property
    def bytes_of_block(self) -> int:
        """Bytes of one block's bounds in all heads."""
        return sum(self[side].shape[1] * self[side].shape[3] * self[side].element_size() for side in SIDES)

    def note(self, kv: KVView, seq: Tensor, slot: Tensor) -> None:
        """Bound the blocks that hold these slots, int [n] each, by all their keys in the cache."""
        with torch.inference_mode(False), torch.no_grad():
            bound_blocks(kv, self["low"], self["high"], seq, slot // self.per, self.per)


SIDES = ("low", "high")


def touched(rows: Rows, page: int) -> tuple[Tensor, Tensor]:
    """(sequence, a slot) of each block that holds a key of the rows, int64 [n]; each once if rows.runs is known."""
    runs = rows.runs
    if runs is None or all(run.rows <= 1 for run in runs) or any(run.first is None for run in runs):
        return rows.seq.long(), rows.pos.long()
    seq, slot = list[Tensor](), list[Tensor]()
    for run in runs:
        if run.rows and run.first is not None:
            ends = run.first // page, (run.first + run.rows - 1) // page + 1
            slot.append(torch.arange(*ends, device=rows.pos.device) * page)
            seq.append(torch.full_like(slot[-1], run.seq))
    return torch.cat(seq), torch.cat(slot)
