"""The entry point of attend_blocks: Block-MKA's attention of few rows, in as few kernels as there can be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.ops.checks import check_logits, check_memory, limits
from longreach.ops.doors import Op
from longreach.ops.impl import Implementations
from longreach.ops.types import INTS, KVView, Partial, Pieces, Rows, describe, require

BLOCK_IMPLEMENTATIONS = Implementations(
    "attend_blocks",
    {
        "reference": "longreach.ops.mix.blocks_reference:attend_blocks",
        "triton": "longreach.ops.mix.triton_blocks:attend_blocks",
    },
)


def attend_blocks(
    rows: Rows,
    kv: KVView,
    first: Tensor,
    recalled: tuple[Tensor, Tensor] | None,
    summaries: Pieces | None,
    weights: Tensor,
    *,
    block: int,
    window: int,
    scale: float,
    levels: Sequence[int] = (1, 2, 3),
    impl: str = "auto",
) -> Partial:
    """One softmax over a row's window (level 1), summaries of blocks (2) and recalled blocks (3), keys of level l
    weighted by its weight (Block-MKA, S5.3-5.4; MKA, Eq. 5-14):

        lse = log sum_l w_l exp(lse_l)
        out = sum_l w_l exp(lse_l - lse) out_l

    rows: q [R, H, D], few of them; kv: keys and values in the order of their positions, k, v [P, G, page, D].
    first: int [R], where each row's window begins; it ends with the row's own slot.
    recalled: (index int32 [R, G, C], used int32 [R, G]) as `recall` returns them, of blocks of `block` slots; None: no
        row recalls any. Of a block, the keys up to the row's own are read.
    summaries: of `attend_summaries`; None: there are none.
    weights: float [R, levels], a column for each of `levels`, which begin with 1. Those below 0 count as 0; where none
        is above 0, level 1 has 1. A level without keys contributes nothing.
    window: how many keys a window has about; launches are shaped by it, and no result.

    Returns Partial (out [R, H, D], lse [R, H], fp32; fp64 for fp64); over no keys out is 0 and lse -inf. No gradient
    flows through the result: for gradients, see `attend_mixed`. Two kernels on a GPU; nothing waits for it (except in
    the reference), and launches depend on shapes alone.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, and on a CPU for blocks or windows out of range;
    UnknownName for an unknown impl; Unsupported for fp64 in Triton.
    """
    check_memory(rows, kv)
    check_logits(scale, None, rows)
    require(kv.slot_pos is None, "kv: expected keys in order, and this view has positions (slot_pos)")
    count, heads = rows.q.shape[0], rows.q.shape[1]
    on = rows.pos.device
    ok = isinstance(first, Tensor) and first.dtype in INTS and first.shape == (count,) and first.device == on
    require(ok, lambda: f"first: expected int [R={count}] on {on}, got {describe(first)}")
    for name, x in (("block", block), ("window", window)):
        require(isinstance(x, int) and x >= 1, lambda: f"{name}: expected a count of keys >= 1, got {x!r}")
    fits = tuple(levels) in ((1,), (1, 2), (1, 3), (1, 2, 3))
    require(fits, lambda: f"levels: expected 1 and then some of 2 and 3, got {levels!r}")
    ok = isinstance(weights, Tensor) and weights.is_floating_point() and weights.shape == (count, len(levels))
    require(
        ok and weights.device == on,
        lambda: f"weights: expected float [{count}, {len(levels)}] on {on}, got {describe(weights)}",
    )
    require(recalled is None or 3 in levels, "recalled: expected 3 among levels")
    require(summaries is None or 2 in levels, "summaries: expected 2 among levels")
    if summaries is not None:
        shape = summaries.out.shape[1:]
        ok = shape == rows.q.shape and summaries.out.device == on
        require(ok, lambda: f"summaries: expected pieces of {list(rows.q.shape)}, got {describe(summaries.out)}")
    if recalled is not None:
        index, used = recalled
        ok = index.dim() == 3 and index.dtype == torch.int32 and index.shape[:2] == (count, kv.heads)
        require(ok, lambda: f"recalled: expected int32 [{count}, {kv.heads}, C], got {describe(index)}")
        ok = used.dtype == torch.int32 and used.shape == (count, kv.heads) and used.device == index.device == on
        require(ok, lambda: f"recalled: expected counts int32 [{count}, {kv.heads}] on {on}, got {describe(used)}")
        if on.type == "cpu" and index.numel():
            lowest, highest = limits(index)
            last = -(-kv.capacity // block)
            require(lowest >= 0 and highest < last, lambda: f"recalled: expected blocks below {last}, got {highest}")
    if on.type == "cpu" and count:
        require(limits(first)[0] >= 0, lambda: f"first: expected >= 0, got {limits(first)[0]}")
    assert heads % kv.heads == 0
    with torch.no_grad():
        found: Partial = BLOCK_IMPLEMENTATIONS.get(impl, on, rows, kv.k)(
            rows, kv, first, recalled, summaries, weights, block=block, window=window, scale=scale, levels=tuple(levels)
        )
    return found


ATTEND_BLOCKS = Op(attend_blocks, BLOCK_IMPLEMENTATIONS, ("rows", "kv", "scale"))  # callers count its reads
