"""Move kept keys and values of one layer to the first slots of their sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longreach.cache.layout import Layout
from longreach.cache.pages import Pages

Pair = tuple[Tensor, Tensor]  # keys and values [P, G, page, D]


def as_pair(held: Pair, make: Callable[[Tensor], Tensor]) -> Pair:
    """`make` of keys and values; once for both if the values are the keys themselves."""
    k, v = held
    new = make(k)
    return new, new if v is k else make(v)


def compacted(memory: Pair, before: Layout, after: Layout, index: dict[int, Tensor]) -> Pair:
    """K and V [P, G, page, D] as `after` lays them out; in place where memory keeps its size, and pages their numbers.

    index: slot -> int64 [G, n], the slots to keep of it. Other sequences stay as they are.
    """
    old, new = before.pages, after.pages
    groups = dict[int, list[int]]()  # sequences that keep equal numbers of slots move together
    for slot, i in index.items():
        groups.setdefault(i.shape[1], []).append(slot)
    chosen = [torch.stack([index[slot] for slot in slots]) for slots in groups.values()]
    found = [_read(memory, old, slots, i) for slots, i in zip(groups.values(), chosen, strict=True)]
    shape = (new.total, memory[0].shape[1], new.size, memory[0].shape[3])
    in_place = memory[0].shape == shape
    out = memory if in_place else as_pair(memory, lambda x: x.new_empty(shape))
    for slots, entries in zip(groups.values(), found, strict=True):
        _write(out, new, slots, entries)
    if not in_place:
        for slot, pages in enumerate(new.held):
            if slot not in index and pages:
                size = min(old.size, new.size)
                for x, y in zip(memory, out, strict=True):
                    y[pages, :, :size] = x[old.held[slot][: len(pages)], :, :size]
    return out


def _read(memory: Pair, pages: Pages, slots: list[int], slot: Tensor) -> Pair:
    """K and V [b, G, n, D]: the entries of sequences `slots` in `slot` [b, G, n]."""
    heads = torch.arange(slot.shape[1], device=slot.device)[:, None]
    page, offset = _places(pages, slots, slot)
    return memory[0][page, heads, offset], memory[1][page, heads, offset]


def _write(memory: Pair, pages: Pages, slots: list[int], entries: Pair) -> None:
    """Put entries [b, G, n, D] into the first slots of sequences `slots`."""
    first = torch.arange(entries[0].shape[2], device=entries[0].device).expand(len(slots), 1, -1)
    page, offset = (x[:, 0] for x in _places(pages, slots, first))
    for x, new in zip(memory, entries, strict=True):
        x[page, :, offset] = new.transpose(1, 2)


def _places(pages: Pages, slots: list[int], slot: Tensor) -> Pair:
    """Page and offset of `slot` [b, g, n], slots of the sequences `slots`."""
    width = max(len(pages.held[s]) for s in slots)
    rows = [[*pages.held[s], *[0] * (width - len(pages.held[s]))] for s in slots]
    table = torch.tensor(rows).to(slot.device, non_blocking=True)
    if width == 1:
        return table[:, None].expand_as(slot), slot
    page = table[:, None].expand(-1, slot.shape[1], -1).gather(2, slot // pages.size)
    return page, slot % pages.size
