"""A cache of chosen sequences of another one, in memory of its own: for branches, wider batches and narrower ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.cache.checks import is_int
from longreach.cache.kv import KVCache
from longreach.cache.layout import Layout
from longreach.cache.pages import Pages
from longreach.errors import CapacityError
from longreach.ops.types import require


def selected(kv: KVCache, slots: Sequence[int]) -> KVCache:
    """A cache of the sequences in `slots`, in this order, with their state. A slot may come several times.

    `kv` stays as it is, and shares no memory with the result. Not during a pass. Raises InvalidInput; CapacityError for
    a pool of fixed size that is too small; Unsupported for a state that cannot be copied.
    """
    total = len(kv.lengths)
    known = all(is_int(s, 0) and s < total for s in slots)
    require(len(slots) > 0 and known, lambda: f"expected sequences in [0, {total}), at least one, got {list(slots)}")
    busy = [s for s, number in enumerate(kv._under_way) if number]
    require(not busy, f"a pass is under way in slots {busy}; commit or abort it first")
    chosen = {id(layout): _chosen(layout, slots) for layout in kv.layouts.groups()}
    sources = {key: torch.tensor(pages, dtype=torch.int64, device=kv.device) for key, (_, pages) in chosen.items()}
    pages = [sources[id(layout)] for layout in kv.layouts.of_layer]
    at = torch.tensor(slots, dtype=torch.int64, device=kv.device)
    state = kv.state.select(at, pages)
    new = KVCache(len(kv.memory), len(slots), kv.config, kv.device, state, kv.memory.resident)
    new.layouts.of_layer = [chosen[id(layout)][0] for layout in kv.layouts.of_layer]
    new.lengths = [kv.lengths[s] for s in slots]
    new.attend, new._evicted = kv.attend, kv._evicted
    with torch.inference_mode(False), torch.no_grad():
        for layer, held in enumerate(kv.memory):
            if held is not None:
                _copy(kv, new, layer, pages[layer])
    return new


def _copy(kv: KVCache, new: KVCache, layer: int, source: Tensor) -> None:
    """Keys and values of a layer."""
    pair, pages = kv._held(layer), new.layouts[layer].pages
    shape = (pages.total, pair[0].shape[1], pages.size, pair[0].shape[3])
    fresh = new.memory.make(layer, shape, *pair)
    used = max(new.slots_in_use(layer)) if pages.contiguous else pages.size
    for x, y in zip(pair, fresh, strict=True):
        y[: len(source), :, :used] = x[:, :, :used][source]


def _chosen(layout: Layout, slots: Sequence[int]) -> tuple[Layout, list[int]]:
    """The layout of the sequences, and the page that each of its first pages is a copy of; the others are free."""
    old, count = layout.pages, len(slots)
    dropped, at = ([each[s] for s in slots] for each in (layout.dropped, layout.evicted_at))
    if old.contiguous:
        return Layout(Pages(count, old.size, count, True, old.limit), dropped, at), list(slots)
    source = [page for s in slots for page in old.held[s]]
    if old.most is not None and len(source) > old.most:
        raise CapacityError(
            f"the KV pool has {old.most} pages of {old.size} tokens, and the {count} sequences need {len(source)}; "
            f"nothing was changed. Raise CacheConfig(pages=...) or select fewer sequences"
        )
    total = old.most or max(1, len(source), -(-old.total * count // old.slots))
    new, first = Pages(count, old.size, total, False, old.limit, old.most), 0
    for number, slot in enumerate(slots):
        new.held[number] = list(range(first, first + len(old.held[slot])))
        first += len(old.held[slot])
    new.free = list(range(first, total))[::-1]
    return Layout(new, dropped, at), source
