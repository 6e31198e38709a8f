"""Attention of MKA and Block-MKA in a layer of a longreach session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers.mka.block_state import BlockState, places_of
from longreach.adapters.transformers.mka.rotation import frequencies_in
from longreach.adapters.transformers.step import Step
from longreach.cache import SequenceState
from longreach.methods.base import Outcome
from longreach.methods.block_mka import ends_of
from longreach.methods.call import LayerCall
from longreach.mka.block import Blocks, Reach, few_rows, scored_with_attention
from longreach.mka.config import MKAConfig
from longreach.mka.full import combine
from longreach.mka.index import IndexCode
from longreach.mka.levels import Levels
from longreach.mka.router import at_least_zero
from longreach.ops import BlockCode, HeadShard, KVView, Lists, Partial, Rows, Span, Spans, absolute, relative
from longreach.ops.doors import EVERYTHING, Read
from longreach.ops.mix import mix
from longreach.ops.types import accumulator


@dataclass
class SessionLevels:
    """The levels of one layer in one pass. The session's method attends to level 1 of `mka`; `block_mka` has its own.

    raw: [R, H, D], queries before rotation. level_2: view of level-2 keys and values, laid out as the method's view of
    level 1, else None. memory: view of level 1 in the cache, None in a pass without a cache. `over` sets both views.
    code: the codes by which this layer compares blocks, None until it has chosen.
    """

    levels: Levels
    number: int
    step: Step
    raw: Tensor
    shard: HeadShard
    level_2: KVView | None = None
    memory: KVView | None = None
    code: BlockCode | IndexCode | None = field(default=None, init=False)

    @property
    def config(self) -> MKAConfig:
        return self.levels.config

    @property
    def heads(self) -> int:
        """KV heads of level 1 on this rank."""
        return self.shard.count

    def over(self, view: KVView, memory: KVView | None) -> KVView:
        """Take keys and values of all levels; those of level 1. view: to attend to. memory: in the cache, else None."""
        first = self._level_1(view)
        if view.heads > self.heads:
            self.level_2 = replace(view, k=view.k[:, self.heads :], v=view.v[:, self.heads :])
        self.memory = first if memory is view else None if memory is None else self._level_1(memory)
        return first

    def _level_1(self, view: KVView) -> KVView:
        return view if view.heads == self.heads else replace(view, k=view.k[:, : self.heads], v=view.v[:, : self.heads])

    @property
    def name(self) -> str | None:
        """Of the attention, in reports."""
        return "block_mka" if self.config.variant == "block_mka" else None

    def __call__(self, call: LayerCall, run: Callable[[], Outcome]) -> Outcome:
        config = self.config
        reach = call.once(("mka", "reach"), lambda: Reach.of(call.rows.pos.long(), None, config))
        blocks = self._blocks(call)
        weights = self.levels.router(self.raw, reach.has_blocks, self.shard)
        if self._few(call, weights):
            return Outcome(self._of_few_rows(call, blocks, reach, weights))
        recalled = self._recall(call, blocks, reach) if 3 in config.tiers else None
        if config.variant == "block_mka":
            sets, outcome = [call.attend(_window(call, reach))], None
            if 2 in config.tiers:
                sets.append(self._summaries(call, blocks, reach))
        else:
            outcome = run()
            sets = [outcome.partial]
            if self.level_2 is not None:
                sets.append(call.attend(EVERYTHING, kv=self.level_2))
        if recalled is not None:
            sets.append(call.attend(recalled))
        if outcome is None or config.mode == "gated":
            impl = call.impl if call.impl in ("reference", "triton") else "auto"
            partial = mix(sets, at_least_zero(weights), impl=impl)
        else:
            partial = Partial(combine(sets, weights, "softmaxes"), sets[0].lse)
        return Outcome(partial) if outcome is None else outcome._replace(partial=partial)

    def _few(self, call: LayerCall, weights: Tensor) -> bool:
        """Whether kernels for few rows compute all levels: of Block-MKA, with plain logits."""
        if self.config.variant != "block_mka" or call.softcap is not None or call.sink_logit is not None:
            return False
        return few_rows(call.rows, call.kv, call.impl, weights)

    def _of_few_rows(self, call: LayerCall, blocks: Blocks, reach: Reach, weights: Tensor) -> Partial:
        config, view, lists, means = self.config, blocks.summaries, None, None
        if 3 in config.tiers:
            code, chooses = self.code, config.recalls(self.number)
            if chooses and code is not None and view is not None and scored_with_attention(call.rows, blocks, code):
                count = min(config.blocks, view.capacity)
                index, used, means = call.op("recall_and_attend", reach.start, reach.stop, count=count, kv=view)
                lists = self._keep(call, index, used)
            else:
                lists = self._recall(call, blocks, reach)
        if 2 in config.tiers and view is not None:
            if means is None:
                means = call.op("attend_summaries", reach.start, reach.stop, kv=view)
            call.count_read(Read.of(view, _before_window(call, reach)), kv=view)
        listed = None if lists is None else (lists.index, lists.count)
        found: Partial = call.op(
            "attend_blocks", reach.window, listed, means, weights, block=config.block,
            window=config.window + config.block, levels=config.tiers,
        )  # fmt: skip
        call.count_read(Read.of(call.kv, _window(call, reach)))
        if lists is not None:
            call.count_read(Read.of(call.kv, lists))
        return found

    def _blocks(self, call: LayerCall) -> Blocks:
        """Codes and summaries of the blocks so far: those of the cache, or computed from the keys of the pass."""
        config, number = self.config, self.number
        summaries = config.variant == "block_mka" and 2 in config.tiers
        chooses = 3 in config.tiers and config.recalls(number)
        if not (summaries or chooses):
            return Blocks(None, None)
        decoder = self.step.facts.decoder
        assert decoder is not None
        frequencies = frequencies_in(decoder)

        def code() -> BlockCode | IndexCode | None:
            return self.levels.code(frequencies, self.shard.first) if chooses else None

        state: SequenceState | None = None
        if self.memory is not None:
            assert self.step.cache is not None
            store, memory = self.step.cache.states, self.memory
            fresh = not store.has_model(("blocks", number))
            state = store.of_model(
                ("blocks", number), lambda: BlockState(memory, config.block, code(), summaries, frequencies)
            )
            assert isinstance(state, BlockState)
            if fresh and any(self.step.append.starts or ()):
                state.kept(number, memory)
            else:
                rows = replace(call.rows, q=call.rows.q.detach())
                state.update(memory, rows, call.once(("mka", "ends"), lambda: ends_of(call.rows, config.block)))
            completed = call.once(("mka", "completed"), lambda: _completed(call, config.block))
            call.count_read(Read.of(call.kv, completed, values=summaries))
            self.code = state.code
        if isinstance(state, BlockState) and self.memory is call.kv:
            return state.views(call.kv, call.once(("mka", "places"), lambda: places_of(call.kv, config.block)))
        kv, block = call.kv, config.block  # of the pass alone, contiguous; gradients flow
        first = torch.arange(0, kv.capacity - kv.capacity % block, block, device=kv.k.device)
        self.code = self.code or code()
        return Blocks.of(kv, first.expand(kv.sequences, -1), self.code, frequencies, block, summaries=summaries)

    def _recall(self, call: LayerCall, blocks: Blocks, reach: Reach) -> Lists:
        """The blocks that each row and KV head recalls; those of the last layer that chose, where layers share them."""
        config = self.config
        if not config.recalls(self.number):
            found = call.shared["mka", "recalled"]
            assert isinstance(found, Lists)
            return found
        if blocks.codes is None:  # no sequence has a complete block
            none = torch.zeros(call.rows.q.shape[0], call.kv.heads, 1, dtype=torch.int32, device=call.rows.q.device)
            lists = call.shared["mka", "recalled"] = Lists(none, none[..., 0], block=config.block)
            return lists
        code = self.code
        assert code is not None
        with torch.no_grad():
            rows = Rows(call.rows.q.detach(), call.rows.seq, call.rows.pos, call.rows.runs)
            if isinstance(code, BlockCode):
                q = call.op("code_rows", code, rows=rows)
            else:
                q = code.of_rows(rows.q, rows.pos).to(rows.q.dtype)
            count = min(config.blocks, blocks.codes.capacity)
            given: dict[str, Any] = {"rows": replace(rows, q=q), "kv": blocks.codes}
            index, used = call.op("recall", reach.start, reach.stop, count=count, pool=code.pool, **given)
        x = blocks.codes.k
        call.read_bytes(reach.stop * (x.shape[1] * x.shape[3] * x.element_size()))
        return self._keep(call, index, used)

    def _keep(self, call: LayerCall, index: Tensor, used: Tensor) -> Lists:
        """The blocks that were chosen, for this layer and those that share them."""
        lists = Lists(index, used, block=self.config.block, all_visible=True, complete=True)
        call.shared["mka", "recalled"] = lists
        return lists

    def _summaries(self, call: LayerCall, blocks: Blocks, reach: Reach) -> Partial:
        if blocks.summaries is None:
            like = call.rows.q
            return Partial.empty(*like.shape, dtype=accumulator(like.dtype), device=like.device)
        return call.attend(_before_window(call, reach), kv=blocks.summaries)


def _window(call: LayerCall, reach: Reach) -> Spans:
    """The keys of each row's window."""
    return call.once(("mka", "window"), lambda: _from(reach.window))


def _before_window(call: LayerCall, reach: Reach) -> Spans:
    """The blocks before each row's window, as slots of the summaries."""
    return call.once(
        ("mka", "summaries"), lambda: Spans((Span(absolute(reach.start[:, None]), absolute(reach.stop[:, None])),))
    )


def _completed(call: LayerCall, block: int) -> Spans:
    """The keys of the block that a row is the last key of."""
    pos = call.rows.pos.long()
    return _from(torch.where(pos % block == block - 1, pos + 1 - block, pos + 1))


def _from(start: Tensor) -> Spans:
    """The keys from start[r] to row r's own."""
    return Spans((Span(absolute(start[:, None]), relative(1)),))
