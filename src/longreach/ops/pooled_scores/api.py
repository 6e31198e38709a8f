"""The front door of pooled_scores."""

from __future__ import annotations

from torch import Tensor

from longreach.ops.checks import check_kept, check_logits, check_memory
from longreach.ops.doors import EVERYTHING, Op, Read
from longreach.ops.impl import Implementations
from longreach.ops.types import INTS, KVView, Logits, Rows, describe, require

IMPLEMENTATIONS = Implementations(
    "pooled_scores",
    {
        "reference": "longreach.ops.pooled_scores.reference:pooled_scores",
        "triton": "longreach.ops.pooled_scores.triton:pooled_scores",
        "numba": "longreach.ops.pooled_scores.numba:pooled_scores",
    },
    few_rows=True,
    needs=Logits,
)


def resolve(
    impl: str, rows: Rows, *, kv: KVView | None = None, lse: Tensor | None = None, logits: Logits | None = None
) -> str:
    """The implementation that `pooled_scores` with these arguments uses.

    "auto" for kept logits is Triton on a GPU and Numba on a CPU, and the reference for all else.
    """
    if logits is None:
        return IMPLEMENTATIONS.choose("reference" if impl == "auto" else impl, rows.q.device)
    return IMPLEMENTATIONS.choose(impl, rows.q.device, rows, kv, lse, logits)


def pooled_scores(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None = None,
    lse: Tensor | None = None,
    logits: Logits | None = None,
    tile: Tensor | None = None,
    tiles: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Post-softmax scores of all keys visible to a row, summed over the query heads of each KV head.

    s[t, g, n] = sum over rows r of tile t and query heads h of g of exp(logit[r, h, n] - lse[r, h])
    (Kascade, section 3.4-3.5; H2O and SnapKV vote the same way).

    lse: fp32 [R, H], the dense log-sum-exp of the rows where it is known: keys are then read once, else twice.
        A sink logit belongs in it.
    logits: those that score_keys or attend_with_logits left for the same rows and view; with the lse it gave, keys are
        not read at all.
    tile: int [R], the tile each row belongs to, with `tiles` the number of tiles; None: each row its own.

    Returns fp32 [tiles, G, N], N = kv.capacity, 0 where nothing is visible. But without `tile`, what lies past the
    slots that a row reaches (at min(seq_lens, pos + 1) and above; after eviction at seq_lens and above) may be
    anything: the reference leaves NaN there, so that its use shows. Triton and Numba take kept logits only.
    Raises InvalidInput, UnknownName, Unsupported.
    """
    check_memory(rows, kv)
    check_logits(scale, softcap, rows)
    count, heads = rows.q.shape[:2]
    require((tile is None) == (tiles is None), "tile and tiles: give both or neither")
    if tile is not None and tiles is not None:
        require(isinstance(tiles, int) and tiles >= 0, lambda: f"tiles: expected a count >= 0, got {tiles!r}")
        ok = isinstance(tile, Tensor) and tile.dtype in INTS and tile.shape == (count,) and tile.device == rows.q.device
        require(ok, lambda: f"tile: expected int [R={count}] on {rows.q.device}, got {describe(tile)}")
        if tile.device.type == "cpu" and count:
            inside = int(tile.min()) >= 0 and int(tile.max()) < tiles
            require(
                inside, lambda: f"tile: expected values in [0, {tiles}), got {int(tile.min())} to {int(tile.max())}"
            )
    if lse is not None:
        ok = isinstance(lse, Tensor) and lse.shape == (count, heads) and lse.is_floating_point()
        ok = ok and lse.device == rows.q.device
        require(ok, lambda: f"lse: expected float [{count}, {heads}] on {rows.q.device}, got {describe(lse)}")
    if logits is not None:
        check_kept(logits, rows, kv)
        require(lse is not None, "lse: kept logits need the lse that came with them; give both")
    compute = IMPLEMENTATIONS.get(resolve(impl, rows, kv=kv, lse=lse, logits=logits), rows.q.device)
    return compute(rows, kv, scale=scale, softcap=softcap, lse=lse, kept=logits, tile=tile, tiles=tiles)


def _reads(
    rows: Rows, kv: KVView, result: Tensor, lse: Tensor | None = None, logits: Logits | None = None,
    tile: Tensor | None = None, tiles: int | None = None,
) -> tuple[Read, ...]:  # fmt: skip
    """Kept logits spare the keys; without the normaliser the keys are read twice."""
    passes = 0 if logits is not None else 2 if lse is None else 1
    return (Read.of(kv, EVERYTHING, values=False),) * passes


POOLED_SCORES = Op(pooled_scores, IMPLEMENTATIONS, ("rows", "kv", "scale", "softcap"), _reads)
