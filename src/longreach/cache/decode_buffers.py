"""Decode steps over buffers at fixed addresses, as a CUDA graph needs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.cache.append import Append, Placement
from longreach.cache.kv import KVCache
from longreach.ops.types import RowRange, require


class DecodeBuffers:
    """Consecutive passes that each append one token to every sequence, over the same buffers.

    `append` is the Append of the next pass. `open` fills its tensors from the host. `advance` moves them on by one
    token on the device, within the captured pass or after it. `count` updates the lengths on the host. A pass reads
    lengths on the device only. `advance` launches 5 kernels for paged memory, else 1, also if layers hold different
    slots after eviction.
    """

    def __init__(self, cache: KVCache, slots: Sequence[int], width: int):
        """width: the most pages that a sequence may hold before eviction."""
        batch, groups = len(slots), cache.layouts.groups()

        def zeros(*shape: int) -> Tensor:
            """int64 zeros. Each row begins at a multiple of 16 bytes, for which kernels are specialised."""
            whole = (*shape[:-1], shape[-1] + shape[-1] % 2)
            return torch.zeros(whole, dtype=torch.int64, device=cache.device)[..., : shape[-1]]

        self.cache, self.width, self.generation, self._opened = cache, width, cache.generation, False
        with torch.inference_mode(False):
            self._moving = zeros(1 + 2 * len(groups), batch)  # positions, then slots and sequence lengths of each group
            pos, self._slot, seq_lens = self._moving.split([1, len(groups), len(groups)])
            shape = (len(groups), batch, width)
            self._table = zeros(*shape) if len(groups) > 1 else zeros(batch * width).view(shape)
            self._page, self._offset = self._table[:, :, 0], self._slot
            if cache.page is not None:
                self._page, self._offset = zeros(len(groups), batch), zeros(len(groups), batch)
            at = torch.tensor(list(slots), dtype=torch.int64, device=cache.device)
            seq = torch.arange(batch, device=cache.device)
        runs, placements = tuple(RowRange(1, b) for b in range(batch)), []
        for g, layout in enumerate(groups):
            spare = 0 if cache.page is None else min((layout.dropped[s] for s in slots), default=0) // cache.page
            table = self._table[g, :, : max(1, width - spare)]  # evicted slots need no pages
            place = (self._slot[g], self._page[g], self._offset[g], seq_lens[g], table)
            placements.append(Placement(*place, runs=runs))
        one = (1,) * batch
        self.append = Append(at, seq, pos[0], cache.layouts.spread(placements), one, one, tuple(slots))

    @property
    def capacity(self) -> int:
        """The most tokens that every sequence may hold in these buffers."""
        groups, tables = self.cache.layouts.groups(), {id(p): p.table for p in self.append.placements}
        return min(
            table.shape[1] * layout.pages.size + layout.dropped[s]
            for layout, table in zip(groups, tables.values(), strict=True)
            for s in self.append.host_slots
        )

    @property
    def valid(self) -> bool:
        """Whether the cache's memory has not moved since these buffers were made."""
        return self.generation == self.cache.generation

    def open(self, steps: int) -> Append:
        """Begin `steps` passes and make room for all of them.

        Raises CapacityError; InvalidInput if the table is too narrow or memory has moved since the buffers were made.
        """
        require(self.valid, "the cache's memory has moved since these buffers were made; make new ones")
        append = self.cache.begin_run(self.append, steps)
        if not self._opened:  # nothing is captured yet, so memory may have grown in `begin_run`
            self.generation, self._opened = self.cache.generation, True
        slots, lengths = append.host_slots, self.cache.lengths
        used = [[lengths[s] - layout.dropped[s] for s in slots] for layout in self.cache.layouts.groups()]
        rows = [[lengths[s] for s in slots], *used, *([n + 1 for n in each] for each in used)]
        with torch.inference_mode(False):
            self._table.copy_(self.cache.layouts.tables(slots, self.width))
            self._moving.copy_(torch.tensor(rows, dtype=torch.int64).view_as(self._moving))
            self._place()
        self.append = append
        return append

    def advance(self) -> None:
        """Move on to the next token, on the device."""
        with torch.inference_mode(False):
            self._moving.add_(1)
            self._place()

    def count(self) -> None:
        """Commit the pass on the host."""
        self.cache.commit(self.append, over=False)

    def close(self) -> None:
        """End the passes and release unused room."""
        self.cache.end_run(self.append)

    def _place(self) -> None:
        """Compute page and offset of each slot. For contiguous memory both are views of other buffers."""
        page = self.cache.page
        if page is not None:
            # nothing is written past the last page; the clamp keeps the look-up inside the table
            number = torch.div(self._slot, page, rounding_mode="floor").clamp_(max=self.width - 1)
            torch.gather(self._table, 2, number[..., None], out=self._page[..., None])
            torch.remainder(self._slot, page, out=self._offset)
