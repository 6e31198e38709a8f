"""Fill caches, and look into them through the views that attention gets."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.cache import Append, KVCache

HEADS, DIM = 2, 8

Tokens = tuple[Tensor, Tensor]  # k, v [n, G, D] of one layer


def random_tokens(count: int, *, heads: int = HEADS, dim: int = DIM, dtype: torch.dtype = torch.float32) -> Tokens:
    k, v = torch.randn(2, count, heads, dim).to(dtype)
    return k, v


def write(cache: KVCache, step: Append) -> list[Tokens]:
    """Append random tokens in every layer; returned layer by layer."""
    layers = [random_tokens(sum(step.counts)) for _ in cache.memory]
    for layer, (k, v) in enumerate(layers):
        cache.append(layer, step, k, v)
    return layers


def fill(cache: KVCache, slots: Sequence[int], counts: Sequence[int]) -> dict[int, list[Tokens]]:
    """A whole pass of random tokens: what each slot got, layer by layer."""
    step = cache.begin(slots, counts)
    layers = write(cache, step)
    cache.commit(step)
    return split(step, layers)


def random_kept(used: int, kept: int, heads: int = HEADS) -> Tensor:
    """int64 [heads, kept]: other slots in each head, ascending."""
    return torch.stack([torch.randperm(used)[:kept].sort().values for _ in range(heads)])


def taken(tokens: Tokens, index: Tensor) -> Tokens:
    """The tokens [n, G, D] that each head keeps, index: [G, n]."""
    heads = torch.arange(index.shape[0])
    k, v = (x[index.T, heads] for x in tokens)
    return k, v


def split(step: Append, layers: list[Tokens]) -> dict[int, list[Tokens]]:
    """Slot -> its part of the tokens of a pass, layer by layer."""
    return {
        slot: [(k[step.seq == row], v[step.seq == row]) for k, v in layers] for row, slot in enumerate(step.host_slots)
    }


def joined(*parts: list[Tokens]) -> list[Tokens]:
    """Tokens behind one another, layer by layer."""
    return [(torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer])) for layer in zip(*parts, strict=True)]


def held(cache: KVCache, slot: int) -> list[Tokens]:
    """What the cache holds in a slot, read through the view of a pass that adds nothing."""
    step = cache.begin([slot], [0])
    found = []
    for layer in range(len(cache.memory)):
        view = cache.view(layer, step)
        places = torch.arange(int(view.seq_lens[0]))
        page, offset = view.locate(torch.zeros_like(places), places)
        found.append((view.k[page, :, offset], view.v[page, :, offset]))
    cache.abort(step)
    return found


def same(a: list[Tokens], b: list[Tokens]) -> bool:
    """Whether two lists of tokens are bit for bit the same (a NaN is never the same)."""
    return len(a) == len(b) and all(
        torch.equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True)
    )


class Snapshot:
    """All that a failed call must leave alone."""

    def __init__(self, cache: KVCache):
        self.books = (list(cache.lengths), copy.deepcopy(cache.layouts.of_layer))
        self.memory = [pair and tuple((x, x.clone()) for x in pair) for pair in cache.memory]

    def unchanged(self, cache: KVCache) -> bool:
        """Same books, the same tensors, and in them the same bits."""
        if self.books != Snapshot(cache).books:
            return False
        for before, now in zip(self.memory, cache.memory, strict=True):
            if (before is None) != (now is None):
                return False
            for (tensor, bits), x in zip(before or (), now or (), strict=True):
                if x is not tensor or not torch.equal(x.view(torch.uint8), bits.view(torch.uint8)):
                    return False
        return True
