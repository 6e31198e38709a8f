"""Block-MKA without training: a window and recalled blocks (MKA, sections 5.3 and 5.4).

A row at position p, with b = block:

    first  = max(0, (p // b - window // b) b)            the window begins at a block's edge
    I[g]   = the `blocks` best of blocks [0, first / b)   per KV head, by codes of blocks (`ops.recall`)
    out    = softmax over [first, p] and the keys of I[g], in one

MKA weighs three sets of keys: window, block summaries, recalled blocks. A pretrained model starts with weights
(1, 0, 1), which is this method: summaries serve the choice alone. It equals dense attention where window and recalled
blocks cover the context. `longreach.mka` trains the weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.cache import PerTokenState, SequenceState
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod, Outcome, attend_densely, is_count
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.choosing import check_layers, check_layers_of
from longreach.ops import BlockCode, KVView, Lists, Rows, Span, Spans, absolute, merge, relative
from longreach.ops.doors import Read
from longreach.ops.recall import KINDS, Kind, check_bits, code_blocks, code_places, code_view, code_width, planes_of
from longreach.ops.types import require

BITS = 128


@dataclass(frozen=True)
class BlockMKA(AttentionMethod):
    """Attention to a window and to the best blocks of keys before it.

    block: keys in a block.
    window: a multiple of `block`; a row attends to its own block and window / block blocks before.
    blocks: recalled by each row and KV head.
    recall: how blocks are scored, summed over the query heads of a KV head: "bounds" (Quest's upper bounds, which find
        most in models that are not trained for recall; heads of up to 128 channels), "summary" (attention weights of
        their mean keys) or "hash" (equal signs of random projections).
    bits, seed: number of the projections of recall="hash", and the seed they are drawn from.
    share: layers that recall; the layers after each use its blocks. (): every layer recalls for itself.
    dense_layers: layers that attend densely.

    The state keeps a code of each complete block. Metadata read: the codes of all blocks before the window. A row that
    completes a block reads its keys to compute the code.
    """

    block: int = 64
    window: int = 512
    blocks: int = 8
    recall: Kind = "bounds"
    bits: int = BITS
    seed: int = 0
    share: tuple[int, ...] = ()
    dense_layers: tuple[int, ...] = ()

    name = "block_mka"
    phases = ("prefill", "decode")
    keeps = "tokens"
    observes_prompt = True

    def __post_init__(self) -> None:
        require(is_count(self.block, 1), f"block: expected a count of keys >= 1, got {self.block!r}")
        fits = is_count(self.window, 1) and self.window % self.block == 0
        require(fits, f"window: expected a multiple of block={self.block}, got {self.window!r}")
        require(is_count(self.blocks, 1), f"blocks: expected a count >= 1, got {self.blocks!r}")
        require(self.recall in KINDS, f"recall: expected one of {', '.join(KINDS)}, got {self.recall!r}")
        check_bits(self.bits)
        drawn = isinstance(self.seed, int) and not isinstance(self.seed, bool) and 0 <= self.seed < 1 << 32
        require(drawn, f"seed: expected an int in [0, 2^32), got {self.seed!r}")
        for name, given, default in (("bits", self.bits, BITS), ("seed", self.seed, 0)):
            used = self.recall == "hash" or given == default
            require(used, f"{name}: expected {default}, as recall={self.recall!r} has no hashes, got {given}")
        for name, layers in (("share", self.share), ("dense_layers", self.dense_layers)):
            check_layers(name, layers)
        both = sorted({*self.share} & {*self.dense_layers})
        require(not both, f"share: expected layers that are not in dense_layers, got {both}")

    @property
    def needs_frequencies(self) -> bool:  # type: ignore[override]  # bounds are of keys after rotation
        return self.recall != "bounds"

    def check(self, model: ModelShape) -> None:
        check_layers_of("share", self.share, model.layers)
        check_layers_of("dense_layers", self.dense_layers, model.layers)
        code_width(self.recall, model.head_dim, self.bits)
        sparse = [layer for layer in range(model.layers) if layer not in self.dense_layers]
        require(
            not self.share or not sparse or sparse[0] in self.share,
            lambda: f"share: expected layer {sparse[0]} among them, the first that is not dense, got {self.share}",
        )

    def recalls(self, layer: int) -> bool:
        """Whether a layer chooses blocks."""
        return layer in self.share if self.share else layer not in self.dense_layers

    def new_state(self, call: LayerCall, slots: int) -> BlockCodes | None:
        if not self.recalls(call.layer):
            return None
        k, width, code = call.kv.k, code_width(self.recall, call.kv.k.shape[3], self.bits), None
        planes = planes_of(k.shape[3], self.bits, self.seed).to(k.device) if self.recall == "hash" else None
        if not self.needs_frequencies:
            code = BlockCode(self.recall)
        elif call.frequencies is not None:
            code = BlockCode(self.recall, call.frequencies(), planes)
        return BlockCodes(call.kv, self.block, width, code, planes)

    def observe_prompt(self, call: LayerCall, state: SequenceState | None) -> None:
        if isinstance(state, BlockCodes) and (self, "noted", call.layer) not in call.shared:
            state.update(call, call.once((self, "ends"), lambda: ends_of(call.rows, self.block)))

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        call.refuse_evicted(self)
        if call.layer in self.dense_layers:
            return attend_densely(call, "in dense_layers")
        if self.recalls(call.layer):
            if not isinstance(state, BlockCodes):
                raise InvalidInput("block_mka: a layer recalls by its codes of blocks; pass the state that holds them")
            self.observe_prompt(call, state)
            call.shared[self, "noted", call.layer] = True  # as decode method it observes the same rows
        windows = call.once((self, "windows"), lambda: self._windows(call.rows.pos.long()))
        if self.recalls(call.layer):
            call.count_read(Read.of(call.kv, windows.completed, values=False))
        if (call.kv.capacity - 1) // self.block <= self.window // self.block:  # no sequence is longer than a window
            return Outcome(call.attend(windows.span if call.phase == "prefill" else windows.lists))
        if isinstance(state, BlockCodes):
            call.shared[self] = self._recall(call, state, windows)
        lists = call.shared.get(self)
        if lists is None:
            raise InvalidInput(
                f"block_mka: layer {call.layer} uses the blocks that a layer in share={self.share} recalls, and none "
                f"before it has recalled in this pass (does it attend to a window?); choose other layers"
            )
        if call.phase == "decode":
            return Outcome(call.attend(lists))
        return Outcome(merge(call.attend(windows.span), call.attend(lists, sink=False)))

    def eviction_refusal(self) -> str:
        return "after eviction slots are not positions, and blocks hold keys of several places"

    def whole_layers(self, model: ModelShape, dtype: torch.dtype) -> Collection[int]:
        return self.dense_layers

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        units, pooled = capacity // self.block, self.recall != "summary"
        codes = rows * model.query_heads * code_width(self.recall, model.head_dim, self.bits) * dtype.itemsize * pooled
        scores = 4 * rows * (model.kv_heads if pooled else model.query_heads) * units
        outputs = 4 * rows * model.query_heads * (model.head_dim + 1)  # made when codes and scores are gone
        listed = 4 * rows * model.kv_heads * (min(self.blocks, units) + 1)
        near = 4 * rows * model.kv_heads * (self.window // self.block + 1)
        return near + listed + max(0, codes + scores - outputs)

    def _windows(self, pos: Tensor) -> Windows:
        block, before = self.block, self.window // self.block
        stop = (pos // block - before).clamp(min=0)
        near = stop[:, None] + torch.arange(before + 1, device=pos.device)
        count = pos // block - stop + 1
        ended = torch.where(pos % block == block - 1, pos + 1 - block, pos + 1)
        return Windows(
            stop,
            Spans((Span(absolute(stop[:, None] * block), relative(1)),)),
            Lists(near[:, None].int(), count[:, None].int(), block=block, all_visible=True),
            Spans((Span(absolute(ended[:, None]), relative(1)),)),
        )

    def _recall(self, call: LayerCall, state: BlockCodes, windows: Windows) -> Lists:
        """The blocks that each row and KV head recalls; in decode the blocks of its window stand before them."""
        stop, near = windows.stop, windows.lists
        call.read_bytes(call.once((self, "bytes"), lambda: stop * state.bytes_of_block))
        places = call.once((self, "places"), lambda: code_places(call.kv, self.block))
        view = code_view(call.kv, state["codes"], self.block, places)
        q = call.op("code_rows", state.code)
        rows = Rows(q, call.rows.seq, call.rows.pos, call.rows.runs)
        count = min(self.blocks, view.capacity)
        index, used = call.op("recall", None, stop, rows=rows, kv=view, count=count, pool=state.code.pool)
        if call.phase == "prefill":  # where rows of a tile share the keys of their windows, as a span
            return Lists(index, used, block=self.block, all_visible=True, complete=True)
        both = torch.cat([near.index.expand(-1, index.shape[1], -1), index], -1)
        return Lists(both, used + near.count, block=self.block, all_visible=True)


class Windows(NamedTuple):
    """The windows of rows. stop: int64 [R], the number of blocks before. span: keys of the window. lists: its blocks;
    no entry is spare where there are blocks before. completed: keys of the block that a row is the last key of."""

    stop: Tensor
    span: Spans
    lists: Lists
    completed: Spans


class BlockCodes(PerTokenState):
    """Codes of the complete blocks of one layer: ["codes"] is [P, G, units, width]."""

    def __init__(self, kv: KVView, per: int, width: int, code: BlockCode | None, planes: Tensor | None):
        """code: None for a state that is only measured. planes: of hashes."""
        super().__init__(kv, per, codes=(width, kv.k.dtype))
        self._code, self._planes = code, planes

    @property
    def code(self) -> BlockCode:
        """How codes are computed. Raises InvalidInput if the frequencies of the rotation are missing."""
        if self._code is None:
            raise InvalidInput(
                "LayerCall.frequencies is required: block_mka codes blocks by keys before rotation; pass a function"
            )
        return self._code

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._planes is None else self._planes.nbytes)

    @property
    def bytes_of_block(self) -> int:
        """Bytes of one block's codes in all heads."""
        codes = self["codes"]
        return codes.shape[1] * codes.shape[3] * codes.element_size()

    def update(self, call: LayerCall, ends: tuple[Tensor, Tensor] | None) -> None:
        """Code the blocks that the rows of a call complete. ends: (sequence, block) of these, if the host knows."""
        self.ensure_capacity(call.kv)
        if ends is None:
            call.op("code_completed", self["codes"], self.code, self.per)
        else:
            self._write(call.kv, *ends)

    def note(self, kv: KVView, seq: Tensor, slot: Tensor) -> None:
        """Code the complete ones of the blocks that hold these slots, int [n] each, by their keys in the cache."""
        self._write(kv, seq, slot // self.per)

    def _write(self, kv: KVView, seq: Tensor, block: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            code_blocks(kv, self["codes"], self.code, seq, block, self.per)


def ends_of(rows: Rows, block: int) -> tuple[Tensor, Tensor] | None:
    """(sequence, block) of the blocks that rows of prompts complete, int64 [n] each; None if the host does not know
    them, or rows are few."""
    runs = rows.runs
    if runs is None or all(run.rows <= 1 for run in runs) or any(run.first is None for run in runs):
        return None
    seq, found = list[Tensor](), list[Tensor]()
    for run in runs:
        first = run.first or 0
        found.append(torch.arange(first // block, (first + run.rows) // block, device=rows.pos.device))
        seq.append(torch.full_like(found[-1], run.seq))
    return torch.cat(seq), torch.cat(found)
