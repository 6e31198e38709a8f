"""Move kept keys and values of one layer to the first slots of their sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.cache.layout import Layout

Pair = tuple[Tensor, Tensor]


def compacted(memory: Pair, before: Layout, after: Layout, index: dict[int, Tensor]) -> Pair:
    """K and V [P, G, page, D] as `after` lays them out; in place where memory keeps its size, and pages their numbers.

    index: slot -> int64 [G, n], the slots to keep of it. Other sequences stay as they are.
    """
    old, new = before.pages, after.pages
    kept = [{s: _read(x, old.held[s], old.size, i) for s, i in index.items()} for x in memory]
    shape = (new.total, memory[0].shape[1], new.size, memory[0].shape[3])
    in_place = memory[0].shape == shape
    out = memory if in_place else (memory[0].new_empty(shape), memory[1].new_empty(shape))
    for x, y, found in zip(memory, out, kept, strict=True):
        for slot, pages in enumerate(new.held):
            if slot in found:
                _write(y, pages, new.size, found[slot])
            elif not in_place and pages:
                size = min(old.size, new.size)
                y[pages, :, :size] = x[old.held[slot][: len(pages)], :, :size]
    return out


def _read(x: Tensor, pages: list[int], size: int, slot: Tensor) -> Tensor:
    """[G, n, D]: the entries of a sequence in `slot` [G, n]."""
    page = torch.tensor(pages, device=x.device)[slot // size]
    return x[page, torch.arange(x.shape[1], device=x.device)[:, None], slot % size]


def _write(x: Tensor, pages: list[int], size: int, entries: Tensor) -> None:
    """Put entries [G, n, D] into the first slots of a sequence."""
    slot = torch.arange(entries.shape[1], device=x.device)
    page = torch.tensor(pages, device=x.device)[slot // size]
    x[page, :, slot % size] = entries.transpose(0, 1)
