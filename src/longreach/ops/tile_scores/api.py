"""The front doors of tile_log_sums and tile_scores, the two passes that choose keys for tiles of a prompt.

No logits are kept: the second pass computes them again (Kascade, section 3.6). So memory does not depend on the number
of rows of a pass, and the scores of some tiles at a time are all that is held.
"""

from __future__ import annotations

from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.checks import check_logits, check_memory
from longreach.ops.doors import Op, nothing
from longreach.ops.impl import Implementations
from longreach.ops.tile_lists import RowTiles
from longreach.ops.types import KVView, Rows, describe, require

LOG_SUMS = Implementations(
    "tile_log_sums", {name: f"longreach.ops.tile_scores.{name}:tile_log_sums" for name in ("reference", "triton")}
)
IMPLEMENTATIONS = Implementations(
    "tile_scores", {name: f"longreach.ops.tile_scores.{name}:tile_scores" for name in ("reference", "triton")}
)


def tile_log_sums(
    rows: Rows,
    kv: KVView,
    tiles: RowTiles,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    every: int = 1,
    impl: str = "auto",
) -> Tensor:
    """The log-sum-exp of dense attention of the rows in `tiles`, without reading a value.

    lse[r, h] = log sum over slots n visible to row r of exp(logit[r, h, n]), natural, the sink logit among them.

    Returns fp32 [R, H] (fp64 for fp64 inputs). Rows in no tile may have any value: the reference leaves NaN there.
    Dense attention of the same rows gives the same numbers, and makes this pass unnecessary.
    every: n. Above 1 the result is an estimate: between slot 64 and 128 slots before a tile's start, each n-th slot
        is read and counts n times. Slots before and after these are all read.
    Raises InvalidInput, UnknownName; Unsupported for views with slot_pos, and as `attend` does.
    """
    _check(rows, kv, tiles, scale, softcap, sink_logit)
    ok = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    require(ok, lambda: f"every: expected a count >= 1, got {every!r}")
    compute = LOG_SUMS.get(impl, rows.q.device, rows, kv)
    found: Tensor = compute(rows, kv, tiles, scale=scale, softcap=softcap, sink_logit=sink_logit, every=every)
    return found


def tile_scores(
    rows: Rows,
    kv: KVView,
    tiles: RowTiles,
    lse: Tensor,
    *,
    columns: int,
    scale: float,
    softcap: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Post-softmax scores of the keys before each tile, summed over the tile's rows and the heads of each KV head.

    s[t, g, n] = sum over rows r of tile t and query heads h of KV head g of exp(logit[r, h, n] - lse[r, h]), for
    n < start[t] (Kascade, section 3.4; pooled after the softmax). Tiles with some of their rows estimate the scores of
    all: a sample.

    tiles: rows see all slots before their tile's start, which must be in use.
    lse: fp32 [R, H] of dense attention, a sink logit among it; read for the rows in tiles.
    columns: slots of the result, at least the largest start.

    Returns fp32 [L, G, columns]. Scores at and after a tile's start, and all those of a tile without rows, may be
    anything: the reference leaves NaN there.
    Raises InvalidInput, UnknownName; Unsupported for views with slot_pos, and as `attend` does. The Triton kernel is
    fastest for tiles that a program holds: 128 rows x query heads of a KV head, fewer of wide heads.
    """
    _check(rows, kv, tiles, scale, softcap, None)
    shape = (rows.q.shape[0], rows.q.shape[1])
    ok = isinstance(lse, Tensor) and lse.shape == shape and lse.is_floating_point() and lse.device == rows.q.device
    require(ok, lambda: f"lse: expected float {list(shape)} on {rows.q.device}, got {describe(lse)}")
    ok = isinstance(columns, int) and not isinstance(columns, bool) and columns >= 0
    require(ok, lambda: f"columns: expected a count >= 0, got {columns!r}")
    if tiles.start.device.type == "cpu" and tiles.start.numel():
        last = int(tiles.start.max())
        require(last <= columns, lambda: f"columns: expected at least {last}, the largest start, got {columns}")
    compute = IMPLEMENTATIONS.get(impl, rows.q.device, rows, kv)
    found: Tensor = compute(rows, kv, tiles, lse, columns=columns, scale=scale, softcap=softcap)
    return found


def _check(
    rows: Rows, kv: KVView, tiles: RowTiles, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> None:
    check_memory(rows, kv)
    check_logits(scale, softcap, rows, sink_logit)
    require(isinstance(tiles, RowTiles), lambda: f"tiles: expected RowTiles, got {describe(tiles)}")
    tiles.check(rows)
    if kv.slot_pos is not None:
        raise Unsupported("tiles of a prompt need slots that are positions, got slot_pos; use pooled_scores")


# a prompt is scored some tiles at a time: the method counts the reads of all tiles at once
TILE_LOG_SUMS = Op(tile_log_sums, LOG_SUMS, ("rows", "kv", "scale", "softcap", "sink_logit"), nothing)
TILE_SCORES = Op(tile_scores, IMPLEMENTATIONS, ("rows", "kv", "scale", "softcap"), nothing)
