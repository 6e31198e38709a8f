"""One choice for each layer with the least sum of errors, within limits on two sums of costs."""

from __future__ import annotations

import numpy as np
from torch import Tensor

BYTES, MEMORY = 2048, 16  # sums that are told apart; of those within one step the one with the least error is kept


def cheapest(costs: Tensor, errors: Tensor, room: Tensor, total: float, limit: float | None) -> list[int] | None:
    """A choice for each layer: the least sum of errors with a sum of costs up to total, and of room up to limit.

    None if no choice fits.

    costs, errors, room: fp64 [layers, choices], >= 0. Dynamic programming over the layers. Sums are exact, so limits
    are kept; of partial sums that are equal to 1/2048 of the total (1/16 of the limit) the one with the least error is
    kept, and of equal errors the one with the least cost.
    """
    layers, choices = costs.shape
    cost, error, space = (x.double().numpy() for x in (costs, errors, room))
    # what the layers after this one need at least: partial sums that leave less lead nowhere
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
