"""pooled_scores on a CPU, compiled by Numba, from kept logits: no key is read."""

from __future__ import annotations

from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.numba_inputs import refuse
from longreach.ops.numba_pool import pool_logits
from longreach.ops.types import KVView, Logits, Rows


def pooled_scores(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None,
    lse: Tensor | None,
    kept: Logits | None,
    tile: Tensor | None,
    tiles: int | None,
) -> Tensor:
    if kept is None or lse is None:
        raise Unsupported(
            "pooled_scores' Numba kernel sums kept logits: give the logits and the lse of score_keys, or use "
            "impl='reference'"
        )
    refuse("pooled_scores", rows, kv, lse, kept)
    return pool_logits(rows, kv, lse, kept, tile, tiles)
