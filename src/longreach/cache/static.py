"""Passes of one token for each sequence of a batch, whose tensors stay where they are: what a CUDA graph needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.cache.kv import Append, KVCache


class StaticSteps:
    """A row of passes over the same memory: each appends one token to every sequence.

    `append` is the Append of the pass to come. Its tensors are fixed buffers: `open` fills them from what the host
    knows, `advance` moves them on by one token on the device (captured with the pass, or called after it), `count`
    lets the host follow. Lengths lie on the device, so a pass reads none from the host.
    """

    def __init__(self, cache: KVCache, slots: Sequence[int], width: int):
        """width: pages a sequence may come to hold."""
        batch = len(slots)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=cache.device)

        with torch.inference_mode(False):
            each = torch.arange(batch, device=cache.device)
            at = torch.tensor(list(slots), dtype=torch.int64, device=cache.device)
            self.append = Append(
                at, each, zeros(batch), zeros(batch), zeros(batch), zeros(batch), zeros(batch, width),
                (1,) * batch, tuple(slots),
            )  # fmt: skip
        self.cache, self.size, self.resized = cache, cache.pages.size, cache.resized

    @property
    def width(self) -> int:
        return self.append.table.shape[1]

    @property
    def valid(self) -> bool:
        """Whether the cache's memory still is what it was when these buffers were made."""
        return self.resized == self.cache.resized

    def open(self, steps: int) -> Append:
        """Begin `steps` passes; all have room from now on. Raises CapacityError; InvalidInput for a narrow table."""
        append = self.cache.begin_run(self.append, steps)
        before = [self.cache.lengths[s] for s in append.host_slots]
        with torch.inference_mode(False):
            append.table.copy_(self.cache.table(append.host_slots, self.width))
            append.pos.copy_(torch.tensor(before, dtype=torch.int64))
            append.filled.copy_(append.pos + 1)
            self._place(append)
        self.append = append
        return append

    def advance(self) -> None:
        """On the device: the next pass appends one token further on."""
        with torch.inference_mode(False):
            self.append.pos.add_(1)
            self.append.filled.add_(1)
            self._place(self.append)

    def count(self) -> None:
        """On the host: the pass is done, its tokens count from now on."""
        self.cache.commit(self.append, over=False)

    def close(self) -> None:
        """No more passes; room that was not used goes back."""
        self.cache.end_run(self.append)

    def _place(self, append: Append) -> None:
        # past the last page nothing is written any more; the clamp keeps the look-up inside the table
        page = (append.pos // self.size).clamp(max=self.width - 1)
        append.page.copy_(append.table.gather(1, page[:, None])[:, 0])
        append.offset.copy_(append.pos % self.size)
