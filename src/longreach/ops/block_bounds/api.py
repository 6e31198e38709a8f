"""Bounds of blocks of keys: the front doors of bound_blocks, bound_newest, score_blocks and bound_and_score.

A block is `per` consecutive slots of a sequence: block b holds slots [b * per, (b + 1) * per). Its bounds are the
least and the largest value of each channel over its filled slots. They are stored in `low` and `high`
[P, G, units, D], page by page like the keys, so that bounds move and are shared with their page:

* block b belongs to the page of its first slot, p = b * per // page (a count of pages from the sequence's start);
* within that page it is unit b - ceil(p * page / per);
* a page has ceil(page / per) units, see `units_per_page`. Where `per` does not divide `page`, blocks straddle pages.

Arguments of all four functions:
    kv: the keys. Only k, seq_lens and block_table are used: a block is a range of slots, whatever their positions.
    low, high: [P, G, units, D], k's dtype and device, any strides whose last dimension is contiguous.
    per: slots in a block, >= 1.
    slot: int [R], each row's own slot; None: rows.pos, where slots are positions. A row's newest block is the block of
        min(slot, seq_lens - 1); there is none where that is negative.
All raise InvalidInput for shapes, dtypes and devices that do not fit, and UnknownName for an unknown impl. No function
waits for the device, and launches depend on shapes alone.
"""

from __future__ import annotations

from torch import Tensor

from longreach.ops.checks import check_memory, slots_of
from longreach.ops.doors import Op
from longreach.ops.impl import Implementations
from longreach.ops.types import INTS, KVView, Rows, describe, require


def _named(op: str) -> Implementations:
    files = {name: f"longreach.ops.block_bounds.{name}:{op}" for name in ("reference", "triton", "numba")}
    return Implementations(op, files)


BOUNDING = _named("bound_blocks")
SCORING = _named("score_blocks")


def units_per_page(page: int, per: int) -> int:
    """Blocks of `per` slots that can start in one page of `page` slots: the size of dimension 2 of low and high."""
    return -(-page // per)


def bound_blocks(
    kv: KVView, low: Tensor, high: Tensor, seq: Tensor, block: Tensor, per: int, *, impl: str = "auto"
) -> None:
    """Recompute the bounds of the named blocks, in place. seq, block: int [n]. One kernel on a GPU.

    Bounds cover the filled slots of a block. Nothing is written for a block without any. Naming a block twice is safe.
    """
    _check_bounds(kv, low, high, per)
    for name, x in (("seq", seq), ("block", block)):
        ok = isinstance(x, Tensor) and x.dtype in INTS and x.dim() == 1 and x.device == kv.k.device
        require(ok, lambda: f"{name}: expected int [n] on {kv.k.device}, got {describe(x)}")
    require(seq.shape == block.shape, lambda: f"block: expected {list(seq.shape)} like seq, got {describe(block)}")
    if seq.device.type == "cpu" and seq.numel():
        first, last = int(seq.min()), int(seq.max())
        require(
            first >= 0 and last < kv.sequences, lambda: f"seq: expected in [0, B={kv.sequences}), got {first} to {last}"
        )
    BOUNDING.get(impl, kv.k.device, kv.k, low, high)(kv, low, high, seq, block, per, in_slots=False)


def bound_newest(
    rows: Rows, kv: KVView, low: Tensor, high: Tensor, per: int, *, slot: Tensor | None = None, impl: str = "auto"
) -> None:
    """Recompute the bounds of each row's newest block, in place. One kernel on a GPU."""
    slot = _check_rows(rows, kv, low, high, per, slot)
    BOUNDING.get(impl, kv.k.device, rows, kv.k, low, high)(kv, low, high, rows.seq, slot, per, in_slots=True)


def score_blocks(
    rows: Rows, kv: KVView, low: Tensor, high: Tensor, per: int, *, slot: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """Upper bounds of the scores of blocks, summed over the query heads of each KV head: fp32 [R, G, blocks].

    For every key k of block b and KV head g: sum over query heads h of g of q_h . k <= scores[r, g, b], since
    max(q low, q high) is q high for q > 0 and q low else (Tang et al., 2024, arXiv 2406.10774, Algorithm 1):
    scores = high . sum_h max(q_h, 0) + low . sum_h min(q_h, 0). The softmax scale is not applied.

    blocks = ceil(kv.capacity / per). Entries from a row's newest block on may be anything (the reference leaves NaN):
    their bounds are not read. fp64 for fp64 inputs. One kernel on a GPU.
    """
    slot = _check_rows(rows, kv, low, high, per, slot)
    scores: Tensor = SCORING.get(impl, kv.k.device, rows, kv.k, low, high)(
        rows, kv, low, high, per, slot=slot, newest=False
    )
    return scores


def bound_and_score(
    rows: Rows, kv: KVView, low: Tensor, high: Tensor, per: int, *, slot: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """`bound_newest`, then `score_blocks`, as a decode step runs them in each layer.

    One kernel on a GPU if rows.runs shows that no sequence has two rows, else two kernels: a row may
    need the bounds of a block that another row of its sequence completes.
    """
    slot = _check_rows(rows, kv, low, high, per, slot)
    runs = [run.seq for run in rows.runs or () for _ in range(run.rows)]
    single = rows.runs is not None and len(set(runs)) == len(runs)
    if not single:
        BOUNDING.get(impl, kv.k.device, rows, kv.k, low, high)(kv, low, high, rows.seq, slot, per, in_slots=True)
    scores: Tensor = SCORING.get(impl, kv.k.device, rows, kv.k, low, high)(
        rows, kv, low, high, per, slot=slot, newest=single
    )
    return scores


BOUND_AND_SCORE = Op(bound_and_score, SCORING)  # callers count its reads, which are the same in all layers


def _check_bounds(kv: KVView, low: Tensor, high: Tensor, per: int) -> None:
    require(isinstance(kv, KVView), lambda: f"kv: expected a KVView, got {describe(kv)}")
    count = isinstance(per, int) and not isinstance(per, bool) and per >= 1
    require(count, lambda: f"per: expected a count of slots >= 1, got {per!r}")
    pages, heads, page, dim = kv.k.shape
    units = units_per_page(page, per)
    for name, x in (("low", low), ("high", high)):
        ok = isinstance(x, Tensor) and x.dim() == 4 and x.dtype == kv.k.dtype and x.device == kv.k.device
        ok = ok and (*x.shape[:2], x.shape[3]) == (pages, heads, dim) and x.shape[2] >= units
        wanted = f"{kv.k.dtype} [P={pages}, G={heads}, units >= {units}, D={dim}] on {kv.k.device}"
        require(ok, lambda: f"{name}: expected {wanted}, got {describe(x)}")
        require(x.stride(3) == 1, lambda: f"{name}: expected a contiguous last dimension, got strides {x.stride()}")


def _check_rows(rows: Rows, kv: KVView, low: Tensor, high: Tensor, per: int, slot: Tensor | None) -> Tensor:
    """The rows' slots, after all checks."""
    check_memory(rows, kv)
    _check_bounds(kv, low, high, per)
    return slots_of(rows, kv, slot)
