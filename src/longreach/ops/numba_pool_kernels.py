# mypy: ignore-errors
"""The Numba kernel that turns kept logits into scores summed over query heads."""

from __future__ import annotations

import numpy as np
from numba import njit

from longreach.ops.numba_math import KERNEL, exp

CHUNK = 512  # slots whose weights are held at a time


@njit(**KERNEL)
def pool(worker, workers, x, lse, reach, tile, pooled):
    """pooled[tile[r], g, n] += sum over h of exp(x[r, g, n, h] - lse[r, g, h]) for n < reach[r], by ranges of slots.

    x: float32 [R, G, N * group]. lse: float32 [R, G, group], where -inf counts as 0. pooled: float32 [tiles, G, N],
    zeros at first. tile: int64 [R].
    """
    rows, heads, group = lse.shape
    slots = pooled.shape[2]
    first, end = slots * worker // workers, slots * (worker + 1) // workers
    base, weight = np.empty(CHUNK * group, np.float32), np.empty(CHUNK * group, np.float32)
    for row in range(rows):
        stop = min(end, reach[row])
        for head in range(heads):
            for i in range(CHUNK * group):
                one = lse[row, head, i % group]
                base[i] = one if one != np.float32(-np.inf) else np.float32(0.0)
            total = pooled[tile[row], head]
            for at in range(first, stop, CHUNK):
                n = min(CHUNK, stop - at)
                mine = x[row, head, at * group : (at + n) * group]
                for i in range(n * group):
                    weight[i] = exp(min(mine[i] - base[i], np.float32(88.0)))
                into = total[at : at + n]
                if group == 1:
                    for c in range(n):
                        into[c] += weight[c]
                elif group == 2:
                    for c in range(n):
                        into[c] += weight[2 * c] + weight[2 * c + 1]
                elif group == 4:
                    for c in range(n):
                        into[c] += (weight[4 * c] + weight[4 * c + 1]) + (weight[4 * c + 2] + weight[4 * c + 3])
                else:
                    for c in range(n):
                        for h in range(group):
                            into[c] += weight[c * group + h]
