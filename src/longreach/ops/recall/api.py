"""The entry points of recall, and of the ops that write codes of blocks.

A block is `per` consecutive slots of a sequence: block b holds slots [b * per, (b + 1) * per), which are positions.
Codes lie in `codes` [P, G, units, F], page by page like the keys, so that they move and are shared with their page. A
block belongs to the page of its first slot. `per` must divide pages or be a multiple of them; `code_view` is the view
in which `recall` finds the codes.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.checks import check_memory, limits, slots_of
from longreach.ops.doors import Op
from longreach.ops.impl import Implementations
from longreach.ops.recall.codes import BlockCode, Pool
from longreach.ops.types import INTS, KVView, Rows, describe, require

MOST_BLOCKS = 1 << 30
POOLS = get_args(Pool)
IMPLEMENTATIONS = Implementations(
    "recall", {"reference": "longreach.ops.recall.reference:recall", "triton": "longreach.ops.recall.triton:recall"}
)
CODING = Implementations(
    "code_blocks",
    {
        "reference": "longreach.ops.recall.reference:code_blocks",
        "triton": "longreach.ops.recall.triton_codes:code_blocks",
    },
)
QUERIES = Implementations(
    "code_rows",
    {"reference": "longreach.ops.recall.reference:code_rows", "triton": "longreach.ops.recall.triton_codes:code_rows"},
)


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
    check_ranges(rows, blocks, start, stop)
    check_choice(count, scale)
    require(pool in POOLS, lambda: f"pool: expected one of {', '.join(POOLS)}, got {pool!r}")
    with torch.no_grad():
        found: tuple[Tensor, Tensor] = IMPLEMENTATIONS.get(impl, rows.q.device, rows, blocks.k)(
            rows, blocks, start, stop, count=count, scale=scale, pool=pool
        )
    return found


def check_ranges(rows: Rows, blocks: KVView, start: Tensor | None, stop: Tensor) -> None:
    """Raise InvalidInput unless start and stop name blocks for each row."""
    require(isinstance(blocks, KVView), lambda: f"blocks: expected a KVView, got {describe(blocks)}")
    check_memory(rows, blocks)
    require(blocks.slot_pos is None, "blocks: expected blocks in order, and this view has positions (slot_pos)")
    for name, x in (("start", start), ("stop", stop)):
        ok = isinstance(x, Tensor) and x.dtype in INTS and x.shape == rows.pos.shape and x.device == rows.pos.device
        ok = ok or (name == "start" and x is None)
        wanted = f"int [R={rows.pos.shape[0]}] on {rows.pos.device}"
        require(ok, lambda: f"{name}: expected {wanted}, got {describe(x)}")
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


def check_choice(count: int, scale: float) -> None:
    """Raise InvalidInput for a count or a scale that is none."""
    ok = isinstance(count, int) and not isinstance(count, bool) and 1 <= count < MOST_BLOCKS
    require(ok, lambda: f"count: expected a count of blocks >= 1, got {count!r}")
    ok = isinstance(scale, (int, float)) and math.isfinite(scale)
    require(ok, lambda: f"scale: expected a finite number, got {scale!r}")


RECALL = Op(recall, IMPLEMENTATIONS, ("rows", "kv", "scale"))  # callers count its reads, the same in all layers


def code_blocks(
    kv: KVView, codes: Tensor, code: BlockCode, seq: Tensor, block: Tensor, per: int, *, means: Tensor | None = None,
    impl: str = "auto",
) -> None:  # fmt: skip
    """Write the codes of the named blocks, in place. seq, block: int [n]. One kernel on a GPU.

    kv: the keys, after rotation; only k, seq_lens and block_table are used. codes: see above, with F = code.width(D)
    and the dtype of k, any strides whose last dimension is contiguous. Nothing is written for blocks that are not
    complete. Naming a block twice is safe. Nothing waits for a GPU (except in the reference).
    means: where the blocks' mean values go as well, laid out like codes [P, G, units, D]; for codes by summary.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, Unsupported for pages that `per` does not fit.
    """
    _check_codes(kv, codes, code, per, means)
    for name, x in (("seq", seq), ("block", block)):
        ok = isinstance(x, Tensor) and x.dtype in INTS and x.dim() == 1 and x.device == kv.k.device
        require(ok, lambda: f"{name}: expected int [n] on {kv.k.device}, got {describe(x)}")
    require(seq.shape == block.shape, lambda: f"block: expected {list(seq.shape)} like seq, got {describe(block)}")
    if seq.device.type == "cpu" and seq.numel():
        first, last = limits(seq)
        require(
            first >= 0 and last < kv.sequences, lambda: f"seq: expected in [0, B={kv.sequences}), got {first} to {last}"
        )
    with torch.no_grad():
        CODING.get(impl, kv.k.device, kv.k)(kv, codes, code, seq, block, per, in_slots=False, means=means)


def code_completed(
    rows: Rows, kv: KVView, codes: Tensor, code: BlockCode, per: int, *, slot: Tensor | None = None,
    means: Tensor | None = None, impl: str = "auto",
) -> None:  # fmt: skip
    """Write the code of the block that a row's key is the last one of, in place; other rows write nothing.

    slot: int [R], each row's own slot; None: rows.pos. Else as `code_blocks`.
    """
    check_memory(rows, kv)
    slot = slots_of(rows, kv, slot)
    _check_codes(kv, codes, code, per, means)
    with torch.no_grad():
        coded = CODING.get(impl, kv.k.device, rows, kv.k)
        coded(kv, codes, code, rows.seq, slot, per, in_slots=True, means=means)


CODE_COMPLETED = Op(code_completed, CODING)  # callers count its reads, the same in all layers


def code_rows(rows: Rows, code: BlockCode, *, impl: str = "auto") -> Tensor:
    """Codes of the rows' queries, [R, H, F], as `BlockCode.of_rows`; of few rows in one kernel on a GPU.

    No gradient flows through the result, but where it is the queries (summary).
    """
    require(isinstance(rows, Rows), lambda: f"rows: expected Rows, got {describe(rows)}")
    require(isinstance(code, BlockCode), lambda: f"code: expected a BlockCode, got {describe(code)}")
    code.width(rows.q.shape[2])
    if code.kind == "summary":
        return rows.q
    with torch.no_grad():
        found: Tensor = QUERIES.get(impl, rows.q.device, rows)(rows.q, rows.pos, code)
    return found


CODE_ROWS = Op(code_rows, QUERIES, ("rows",))


def code_places(kv: KVView, per: int) -> tuple[Tensor, Tensor | None]:
    """(complete blocks of each sequence, block table) of the codes of a view: the same for all layers with its slots.

    Raises Unsupported where `per` neither divides pages nor is a multiple of them.
    """
    check_pages(kv, per)
    table = kv.block_table
    if table is not None and per > kv.page:
        table = table[:, :: per // kv.page].contiguous()
    return kv.seq_lens // per, table


def code_view(kv: KVView, codes: Tensor, per: int, places: tuple[Tensor, Tensor | None] | None = None) -> KVView:
    """The codes of complete blocks as `recall` takes them. places: those of `code_places`, if they are there."""
    lengths, table = places or code_places(kv, per)
    if table is not None and table.shape[1] > 1:
        codes = codes[:, :, : max(1, kv.page // per)]
    return KVView(codes, codes, lengths, table)


def check_pages(kv: KVView, per: int) -> None:
    """Raise Unsupported where blocks of `per` slots would straddle pages."""
    pages = 1 if kv.block_table is None else kv.block_table.shape[1]
    if pages > 1 and kv.page % per and per % kv.page:
        raise Unsupported(
            f"blocks of {per} keys neither divide pages of {kv.page} slots nor are multiples of them; choose another "
            f"size of blocks or pages"
        )


def _check_codes(kv: KVView, codes: Tensor, code: BlockCode, per: int, means: Tensor | None) -> None:
    require(isinstance(kv, KVView), lambda: f"kv: expected a KVView, got {describe(kv)}")
    require(isinstance(code, BlockCode), lambda: f"code: expected a BlockCode, got {describe(code)}")
    ok = isinstance(per, int) and not isinstance(per, bool) and per >= 1
    require(ok, lambda: f"per: expected a count of slots >= 1, got {per!r}")
    check_pages(kv, per)
    _check_units("codes", codes, kv, per, code.width(kv.k.shape[3]))
    if means is not None:
        require(code.kind == "summary", lambda: f"means: written beside codes by summary, not {code.kind!r}")
        _check_units("means", means, kv, per, kv.v.shape[3])


def _check_units(name: str, x: Tensor, kv: KVView, per: int, width: int) -> None:
    """Raise InvalidInput unless x has a vector for each block of each page."""
    pages, heads, page, _ = kv.k.shape
    units = -(-page // per)
    ok = isinstance(x, Tensor) and x.dim() == 4 and x.dtype == kv.k.dtype and x.device == kv.k.device
    ok = ok and (*x.shape[:2], x.shape[3]) == (pages, heads, width) and x.shape[2] >= units
    wanted = f"{kv.k.dtype} [P={pages}, G={heads}, units >= {units}, F={width}] on {kv.k.device}"
    require(ok, lambda: f"{name}: expected {wanted}, got {describe(x)}")
    require(x.stride(3) == 1, lambda: f"{name}: expected a contiguous last dimension, got strides {x.stride()}")
