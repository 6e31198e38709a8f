"""The entry point of recall."""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from torch import Tensor

from longreach.ops.checks import check_memory, limits
from longreach.ops.doors import Op, Read
from longreach.ops.impl import Implementations
from longreach.ops.recall.codes import Pool
from longreach.ops.selection import Span, Spans, absolute
from longreach.ops.types import INTS, KVView, Rows, describe, require

MOST_BLOCKS = 1 << 30
POOLS = get_args(Pool)
IMPLEMENTATIONS = Implementations("recall", {"reference": "longreach.ops.recall.reference:recall"})


def recall(
    rows: Rows, blocks: KVView, start: Tensor | None, stop: Tensor, *, count: int, scale: float, pool: Pool,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The blocks with the highest scores, for each row and KV head: index and count for `Lists(block=...)`.

    rows: codes of queries, q [R, H, F] (`BlockCode.of_rows`); positions are not used.
    blocks: codes of blocks as keys, k [P, G, units, F] with v = k; seq_lens counts the blocks of each sequence.
    start, stop: int [R] on the device: a row may choose blocks [start, stop), within those of its sequence. None: 0.

    The score of block n for KV head g, over the query heads h of g:
        pool="softmax": sum over h of softmax over n in [start, stop) of scale q_h . code_n
        pool="sum":     sum over h of scale q_h . code_n
    Larger scores win, among equal ones later blocks, so that a choice does not depend on how many rows or blocks are
    computed together. -0.0 equals 0.0, NaN counts as -inf. Logits are fp32 (fp64 for fp64).

    Returns index int32 [R, G, count], ascending, and used int32 [R, G], the number of entries in use: `count`, cut to
    the blocks that the row may choose. Entries past it are 0. No gradient flows through the result.
    Memory: less than 2^27 numbers in addition to the result, whatever the number of rows. Nothing waits for a GPU
    (except in the reference), and launches depend on shapes alone.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, and on a CPU for ranges that reach past a
    sequence's blocks, which are cut elsewhere; UnknownName for an unknown impl.
    """
    require(isinstance(blocks, KVView), lambda: f"blocks: expected a KVView, got {describe(blocks)}")
    check_memory(rows, blocks)
    require(blocks.slot_pos is None, "blocks: expected blocks in order, and this view has positions (slot_pos)")
    for name, x in (("start", start), ("stop", stop)):
        ok = isinstance(x, Tensor) and x.dtype in INTS and x.shape == rows.pos.shape and x.device == rows.pos.device
        ok = ok or (name == "start" and x is None)
        wanted = f"int [R={rows.pos.shape[0]}] on {rows.pos.device}"
        require(ok, lambda: f"{name}: expected {wanted}, got {describe(x)}")
    ok = isinstance(count, int) and not isinstance(count, bool) and 1 <= count < MOST_BLOCKS
    require(ok, lambda: f"count: expected a count of blocks >= 1, got {count!r}")
    ok = isinstance(scale, (int, float)) and math.isfinite(scale)
    require(ok, lambda: f"scale: expected a finite number, got {scale!r}")
    require(pool in POOLS, lambda: f"pool: expected one of {', '.join(POOLS)}, got {pool!r}")
    require(blocks.capacity < MOST_BLOCKS, lambda: f"blocks: expected below {MOST_BLOCKS}, got {blocks.capacity}")
    if rows.pos.device.type == "cpu" and rows.pos.numel():  # elsewhere reading values would cost a sync
        if start is not None:
            require(limits(start)[0] >= 0, lambda: f"start: expected >= 0, got {limits(start)[0]}")
        over = stop > blocks.seq_lens[rows.seq.long()]
        require(
            not bool(over.any()),
            lambda: (
                f"stop: expected at most the blocks of the row's sequence, got {int(stop[over][0])} of "
                f"{int(blocks.seq_lens[rows.seq.long()][over][0])}"
            ),
        )
    with torch.no_grad():
        found: tuple[Tensor, Tensor] = IMPLEMENTATIONS.get(impl, rows.q.device, rows, blocks.k)(
            rows, blocks, start, stop, count=count, scale=scale, pool=pool
        )
    return found


def _reads(
    rows: Rows, blocks: KVView, result: Any, start: Tensor | None, stop: Tensor, **given: Any
) -> tuple[Read, ...]:
    first = absolute(0) if start is None else absolute(start[:, None])
    return (Read.of(blocks, Spans((Span(first, absolute(stop[:, None])),)), values=False),)


RECALL = Op(recall, IMPLEMENTATIONS, ("rows", "kv", "scale"), _reads)
