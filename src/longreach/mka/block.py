"""Attention of Block-MKA, and the choice of blocks that MKA shares with it. Plain functions of rows and views.

A row at position p of its sequence has the window [first, p], first = max(0, (p // B - w // B) B): windows begin at a
block's edge, so no key lies between window and recall. The blocks complete before `first` are summarised (level 2) and
recalled (level 3). One softmax over all of them, keys of level l weighted by weights[l] (Eq. 5-14):

    out = sum_l w_l sum_n exp(s q.k_ln) v_ln / sum_l w_l sum_n exp(s q.k_ln)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from longreach.mka.config import MKAConfig
from longreach.mka.router import at_least_zero
from longreach.ops.mix import KeySet, attend_blocks, attend_mixed
from longreach.ops.recall import BlockCode, Pool, attend_summaries, recall, recall_and_attend
from longreach.ops.rope import RotaryFrequencies
from longreach.ops.selection import Lists, Span, Spans, absolute, relative
from longreach.ops.types import KVView, Partial, Pieces, Rows, accumulator

MOST_LOGITS = 1 << 25  # of few rows, held at a time


class Code(Protocol):
    """How blocks and queries are compared: BlockCode or IndexCode."""

    @property
    def pool(self) -> Pool: ...

    def width(self, dim: int) -> int: ...

    def of_blocks(self, k: Tensor, first: Tensor) -> Tensor: ...

    def of_rows(self, q: Tensor, pos: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Reach:
    """What a row attends to, int64 [R] each: the window's first slot, and blocks [start, stop) complete before it."""

    window: Tensor
    start: Tensor
    stop: Tensor

    @classmethod
    def of(cls, slot: Tensor, start: Tensor | None, config: MKAConfig) -> Reach:
        """slot: of the rows; start: slot of their sequence's first token, a multiple of the block; None: 0."""
        first = torch.zeros_like(slot) if start is None else start
        window = torch.maximum(first, (slot // config.block) * config.block - config.window)
        return cls(window, first // config.block, window // config.block)

    @property
    def has_blocks(self) -> Tensor:
        """bool [R]: whether complete blocks lie before the window."""
        return self.stop > self.start


@dataclass(frozen=True)
class Recalled:
    """Blocks that rows recall: index int32 [R, G, C], used int32 [R, G].

    summaries: attention to level 2 of the layer that chose, where it came with the choice.
    """

    index: Tensor
    used: Tensor
    summaries: Pieces | None = None


@dataclass(frozen=True)
class Blocks:
    """Complete blocks of a memory of keys: codes to choose by, and summaries to attend to.

    codes: view whose keys are codes [P, G, n, F]; None where level 3 is not in use, or another layer chooses.
    summaries: view of mean keys, rotated to the block's middle, and mean values; None where level 2 is not in use.
    """

    codes: KVView | None
    summaries: KVView | None

    @property
    def by_summaries(self) -> bool:
        """Whether codes are the mean keys of the summaries themselves, in the same memory."""
        if self.codes is None or self.summaries is None:
            return False
        codes, keys = self.codes.k, self.summaries.k
        return codes.data_ptr() == keys.data_ptr() and codes.shape == keys.shape and codes.stride() == keys.stride()

    @classmethod
    def of(cls, kv: KVView, first: Tensor, code: Code | None, frequencies: RotaryFrequencies, block: int, *,
           summaries: bool) -> Blocks:  # fmt: skip
        """All complete blocks of contiguous memory, or neither where it has none.

        first: int [P, n], positions by which their first keys are rotated. code: None for no codes. Differentiable
        through the summaries.
        """
        units = first.shape[1]
        if not units:
            return cls(None, None)
        k, v = (x[:, :, : units * block].unflatten(2, (units, block)) for x in (kv.k, kv.v))
        lens = torch.full((kv.sequences,), units, dtype=torch.int64, device=kv.k.device)
        first = first[:, None].expand(k.shape[:3])
        codes = means = None
        if summaries:
            keys = BlockCode("summary", frequencies).of_blocks(k, first).contiguous()
            values = v.to(accumulator(v.dtype)).mean(3).to(v.dtype).contiguous()
            means = KVView(keys, values, lens)
        if code is not None:
            with torch.no_grad():
                same = code.pool == "softmax" and means is not None
                found = means.k.detach() if same and means is not None else code.of_blocks(k, first).contiguous()
                codes = KVView(found, found, lens)
        return cls(codes, means)


def few_rows(rows: Rows, kv: KVView, impl: str, *others: Tensor) -> bool:
    """Whether Triton's kernels for few rows compute an attention: about a row a sequence, and no gradient.

    others: further tensors that may require one.
    """
    several = rows.q.shape[0] >= 2 * kv.sequences
    if rows.runs is not None:
        several = max((run.rows for run in rows.runs), default=0) > 1
    triton = impl == "triton" or (impl == "auto" and rows.q.device.type == "cuda" and kv.calls is None)
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (rows.q, kv.k, kv.v, *others))
    return triton and not (several or trained) and kv.slot_pos is None


def scored_with_attention(rows: Rows, blocks: Blocks, code: Code) -> bool:
    """Whether the logits by which few rows choose blocks are those of their attention to summaries."""
    if code.pool != "softmax" or blocks.summaries is None or not blocks.by_summaries:
        return False
    return rows.q.shape[0] * rows.q.shape[1] * blocks.summaries.capacity <= MOST_LOGITS


def choose(rows: Rows, pos: Tensor, kv_heads: int, blocks: Blocks, reach: Reach, code: Code, config: MKAConfig,
           scale: float, *, impl: str = "auto") -> Recalled:  # fmt: skip
    """The blocks that each row and KV head recalls. pos: positions by which the rows are rotated [R].

    Where few rows choose by summaries, these are attended to in the same pass over them (`Recalled.summaries`).
    """
    if blocks.codes is None:
        none = torch.zeros(rows.q.shape[0], kv_heads, 1, dtype=torch.int32, device=pos.device)
        return Recalled(none, none[..., 0])
    count, means = config.blocks, blocks.summaries
    if means is not None and few_rows(rows, means, impl) and scored_with_attention(rows, blocks, code):
        found = recall_and_attend(rows, means, reach.start, reach.stop, count=count, scale=scale, impl=impl)
        return Recalled(*found)
    with torch.no_grad():
        queries = code.of_rows(rows.q.detach(), pos).to(blocks.codes.k.dtype)
        return Recalled(*recall(
            replace(rows, q=queries, runs=None), blocks.codes, reach.start, reach.stop,
            count=count, scale=scale if code.pool == "softmax" else 1.0, pool=code.pool, impl=_own(impl),
        ))  # fmt: skip


def recalled_keys(rows: Rows, kv: KVView, recalled: Recalled, block: int) -> KeySet:
    """The keys of recalled blocks (level 3)."""
    return KeySet(rows, kv, Lists(recalled.index, recalled.used, block=block))


def summaries_before(rows: Rows, summaries: KVView, reach: Reach) -> KeySet:
    """The summaries of all blocks before the window (level 2 of Block-MKA)."""
    last = rows.pos.new_full((), summaries.capacity).expand_as(rows.pos)
    runs = rows.runs and tuple(run._replace(first=None) for run in rows.runs)  # all rows are at `last`
    some = Spans((Span(absolute(reach.start[:, None]), absolute(reach.stop[:, None])),))
    return KeySet(Rows(rows.q, rows.seq, last, runs), summaries, some)


def window_keys(rows: Rows, kv: KVView, reach: Reach) -> KeySet:
    """The window of each row (level 1 of Block-MKA)."""
    return KeySet(rows, kv, Spans((Span(absolute(reach.window[:, None]), relative(1)),)))


def block_attention(
    rows: Rows,
    kv: KVView,
    reach: Reach,
    blocks: Blocks,
    recalled: Recalled | None,
    weights: Tensor,
    config: MKAConfig,
    scale: float,
    *,
    impl: str = "auto",
) -> Partial:
    """Block-MKA of the rows of one layer.

    weights: [R, levels], as `Router` makes them of queries and `reach.has_blocks`. recalled: None without level 3.
    Differentiable but for the choice.
    """
    if few_rows(rows, kv, impl, weights):
        return _of_few_rows(rows, kv, reach, blocks, recalled, weights, config, scale, impl)
    sets, levels = [window_keys(rows, kv, reach)], [config.tiers.index(1)]
    if 2 in config.tiers and blocks.summaries is not None:
        sets.append(summaries_before(rows, blocks.summaries, reach))
        levels.append(config.tiers.index(2))
    if 3 in config.tiers:
        assert recalled is not None
        sets.append(recalled_keys(rows, kv, recalled, config.block))
        levels.append(config.tiers.index(3))
    some = at_least_zero(weights)
    if len(levels) < weights.shape[1]:  # no block has a summary yet
        some = some[:, levels]
    return attend_mixed(sets, some, scale=scale, impl=impl)


def _of_few_rows(rows: Rows, kv: KVView, reach: Reach, blocks: Blocks, recalled: Recalled | None, weights: Tensor,
                 config: MKAConfig, scale: float, impl: str) -> Partial:  # fmt: skip
    """block_attention without gradients: every level's keys in pieces, which one kernel weighs and mixes."""
    means = None if recalled is None else recalled.summaries
    if means is None and 2 in config.tiers and blocks.summaries is not None:
        means = attend_summaries(rows, blocks.summaries, reach.start, reach.stop, scale=scale, impl=impl)
    listed = None
    if 3 in config.tiers:
        assert recalled is not None
        listed = recalled.index, recalled.used
    return attend_blocks(
        rows, kv, reach.window, listed, means, weights, block=config.block, window=config.window + config.block,
        scale=scale, levels=config.tiers, impl=impl,
    )  # fmt: skip


def _own(impl: str) -> str:
    """The implementation of ops that fewer implementations compute than attention."""
    return impl if impl in ("reference", "triton") else "auto"
