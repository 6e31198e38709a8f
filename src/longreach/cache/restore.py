"""Keys and values of a cache one sequence behind the other, as a file holds them, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from longreach.cache.compact import Pair, as_pair
from longreach.cache.kv import KVCache
from longreach.cache.layout import Layout
from longreach.errors import InvalidInput
from longreach.ops.types import require


def packed(kv: KVCache, layer: int, number: int) -> Tensor:
    """Keys (number 0) or values (1) of the slots in use, [N, G, D]: one sequence behind the other, copied."""
    pages, x = kv.layouts[layer].pages, kv._held(layer)[number]
    with torch.no_grad():
        found = [
            x[pages.held[slot]].transpose(0, 1).flatten(1, 2)[:, :count].transpose(0, 1)
            for slot, count in enumerate(kv.slots_in_use(layer))
        ]
        return torch.cat(found)


def restore(
    kv: KVCache, lengths: Sequence[int], dropped: Sequence[Sequence[int]], evicted_at: Sequence[Sequence[int]],
    layers: Iterable[Pair],
) -> None:  # fmt: skip
    """Fill an empty cache. After an error it must not be used.

    lengths: tokens of each sequence. dropped, evicted_at: of each layer, as in `Layout`. layers: K and V of each layer,
    as `packed` returns them; one tensor twice if they are one. State is not restored. Raises
    InvalidInput, CapacityError.
    """
    require(not any(kv.lengths) and not any(kv.memory), "restore: expected an empty cache")
    kinds = [(tuple(gone), tuple(at)) for gone, at in zip(dropped, evicted_at, strict=True)]
    made = {kind: Layout(kv.config.plan(len(lengths)), list(kind[0]), list(kind[1])) for kind in kinds}
    tokens = dict(enumerate(lengths))
    for layout in made.values():
        layout.take(tokens, *layout.sizes_for(tokens, exact=True))
    kv.layouts.of_layer = [made[kind] for kind in kinds]
    kv._evicted = any(any(gone) for gone, _ in made)
    with torch.inference_mode(False), torch.no_grad():
        for layer, (k, v) in enumerate(layers):
            _fill(kv, layer, list(kv.layouts[layer].in_use(tokens).values()), k, v)
    kv.lengths = list(lengths)


def _fill(kv: KVCache, layer: int, each: Sequence[int], k: Tensor, v: Tensor) -> None:
    """Allocate a layer and write the slots in use of each sequence."""
    pages = kv.layouts[layer].pages
    if k.dim() != 3 or k.shape != v.shape or len(k) != sum(each):
        raise InvalidInput(f"layer {layer}: expected keys and values [{sum(each)}, G, D], got {list(k.shape)}")
    k, v = as_pair((k, v), lambda x: x.to(kv.device))
    shape = (pages.total, k.shape[1], pages.size, k.shape[2])
    pair = kv.memory.make(layer, shape, k, v)
    first = 0
    for slot, count in enumerate(each):
        for number, page in enumerate(pages.held[slot]):
            here = slice(first + number * pages.size, first + min(count, (number + 1) * pages.size))
            for x, y in zip((k, v), pair, strict=True):
                part = x[here].transpose(0, 1)
                y[page, :, : part.shape[1]] = part
        first += count
