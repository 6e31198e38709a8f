"""What methods share in choosing what a row attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.methods.base import is_count
from longreach.ops.types import require


def check_layers(name: str, layers: object) -> None:
    """Raise InvalidInput unless `layers` is a tuple of layer numbers, each once, ascending."""
    ok = isinstance(layers, tuple) and all(is_count(n) for n in layers) and list(layers) == sorted(set(layers))
    require(ok, f"{name}: expected a tuple of layer numbers, ascending, got {layers!r}")


def check_layers_of(name: str, layers: tuple[int, ...], count: int) -> None:
    """Raise InvalidInput where a layer is none of the model's `count`."""
    for layer in layers:
        require(
            layer < count,
            f"{name}: expected layers of the model, which has {count} (0 to {count - 1}), got layer {layer}",
        )


def most(amount: int | float, capacity: int) -> int:
    """The most keys that `base.budget` can ask for at any length up to `capacity`."""
    return min(capacity, int(amount * capacity) + 1 if isinstance(amount, float) else amount)


def best(scores: Tensor, count: Tensor, length: Tensor, *, capacity: int, last: int = 0) -> tuple[Tensor, Tensor]:
    """The `count` best of the first `length` entries of each row, in ascending order; ties go to the lower one.

    scores: finite float [R, heads, N]; count, length: int [R, heads] or [R, 1]; capacity: entries of the lists, at
    least the largest count. The `last` ones of each row come before all others. Entries at `length` and above may hold
    anything. No device sync.

    Returns (index int32 [R, heads, capacity], past the count anything; count int64 [R, heads]).
    """
    entry = torch.arange(scores.shape[2], device=scores.device)
    length, count = (x.long().expand(scores.shape[:2]) for x in (length, count))
    x = scores.masked_fill(entry >= (length - last)[..., None], torch.inf)
    x = x.masked_fill(entry >= length[..., None], -torch.inf)
    order = x.sort(dim=-1, descending=True, stable=True).indices[..., :capacity]
    used = count.minimum(length)
    spare = torch.arange(order.shape[2], device=order.device) >= used[..., None]
    return order.masked_fill(spare, scores.shape[2]).sort(dim=-1).values.int(), used
