"""Choose one option for each layer: the least sum of errors within limits on two sums of costs."""

from __future__ import annotations

import numpy as np
from torch import Tensor

BYTES, MEMORY = 2048, 16  # steps of the sums of costs and of room; one partial sum is kept in each step


def cheapest(costs: Tensor, errors: Tensor, room: Tensor, total: float, limit: float | None) -> list[int] | None:
    """The choice of each layer with the least sum of errors, if costs sum to at most total and room to at most limit.

    None if no choice fits. costs, errors, room: fp64 [layers, choices], >= 0. limit: None for no limit on room.

    Dynamic programming over the layers. Partial sums are grouped in steps of 1/2048 of the total and 1/16 of the limit.
    Each group keeps its partial sum with the least error; of equal errors the one with the least cost, and then the
    least room. Sums are not rounded, so the limits hold exactly.
    """
    layers, choices = costs.shape
    cost, error, space = (x.double().numpy() for x in (costs, errors, room))
    # the least that later layers need; partial sums that leave less are dropped
    after = np.append(cost.min(1)[::-1].cumsum()[::-1][1:], 0.0)
    space_after = np.append(space.min(1)[::-1].cumsum()[::-1][1:], 0.0)
    top = np.inf if limit is None else limit
    sums = np.zeros((1, 3))  # cost, error, room of the partial sums that are kept
    steps = list[tuple[np.ndarray, np.ndarray]]()  # for each layer: where each sum came from, and its choice
    for n in range(layers):
        new = (sums[:, None] + np.stack([cost[n], error[n], space[n]], 1)).reshape(-1, 3)
        came = np.arange(len(new))
        fits = (new[:, 0] + after[n] <= total * (1 + 1e-9)) & (new[:, 2] + space_after[n] <= top * (1 + 1e-9))
        new, came = new[fits], came[fits]
        if not len(new):
            return None
        key = np.floor(new[:, 0] / total * BYTES).astype(np.int64)
        if limit is not None:
            key = key * (MEMORY + 2) + np.floor(new[:, 2] / max(limit, 1e-30) * MEMORY).astype(np.int64)
        order = np.lexsort((new[:, 2], new[:, 0], new[:, 1], key))
        _, first = np.unique(key[order], return_index=True)
        kept = order[first]
        sums = new[kept]
        steps.append((came[kept] // choices, came[kept] % choices))
    at = int(np.lexsort((sums[:, 0], sums[:, 1]))[0])
    found = list[int]()
    for came_from, choice in reversed(steps):
        found.append(int(choice[at]))
        at = int(came_from[at])
    return found[::-1]
