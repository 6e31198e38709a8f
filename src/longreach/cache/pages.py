"""The pages of each sequence. Host work, done between steps; steps read the block table on the device."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count, islice

from longreach.errors import CapacityError


@dataclass
class Pages:
    """A pool of `total` pages of `size` tokens, handed to `slots` sequences.

    Contiguous memory has one page a sequence (`size` = its capacity), and its pages grow when a sequence outgrows one.
    Otherwise the pool gets more pages. Either doubles, up to `limit` tokens a sequence or `most` pages; None: no limit.
    """

    slots: int
    size: int
    total: int
    contiguous: bool
    limit: int | None = None
    most: int | None = None
    held: list[list[int]] = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.held = [[s] if self.contiguous else [] for s in range(self.slots)]
        self.free = [] if self.contiguous else list(range(self.total))[::-1]

    def sizes_for(self, lengths: dict[int, int], exact: bool = False) -> tuple[int, int]:
        """(size, total) with room for slot -> length tokens. Changes nothing; raises CapacityError.

        exact: grow to what is needed and no further, for lengths that are final.
        """
        grown = _exactly if exact else _doubled
        longest = max(lengths.values(), default=0)
        if self.limit is not None and longest > self.limit:
            raise CapacityError(
                f"the KV cache holds {self.limit} tokens a sequence, {longest} are needed; nothing was written. "
                f"Raise CacheConfig(capacity=...) or shorten the prompt or max_new_tokens"
            )
        if self.contiguous:
            return grown(self.size, longest, self.limit), self.total
        used = self.total - len(self.free)
        wanted = sum(self._missing(slot, n) for slot, n in lengths.items())
        if self.most is not None and used + wanted > self.most:
            raise CapacityError(
                f"the KV pool has {self.most} pages of {self.size} tokens, {used} in use, and {wanted} more are "
                f"needed; nothing was written. Raise CacheConfig(pages=...) or lower the batch"
            )
        most = self.most or (self.limit and self.slots * -(-self.limit // self.size))
        return self.size, grown(self.total, used + wanted, most)

    def take(self, lengths: dict[int, int], size: int, total: int) -> None:
        """Hand out pages, once memory of `sizes_for` is allocated."""
        self.free = list(range(self.total, total))[::-1] + self.free
        self.size, self.total = size, total
        if not self.contiguous:
            for slot, n in lengths.items():
                self.held[slot] += [self.free.pop() for _ in range(self._missing(slot, n))]

    def _missing(self, slot: int, length: int) -> int:
        return max(0, -(-length // self.size) - len(self.held[slot]))

    def release(self, slot: int, length: int) -> None:
        """Give back the pages of `slot` past `length` tokens."""
        if not self.contiguous:
            keep = -(-length // self.size)
            self.free += self.held[slot][keep:][::-1]
            del self.held[slot][keep:]

    def shrunk(self, lengths: list[int], room: int = 0) -> Pages:
        """The same sequences, cut to `lengths`, in no more memory than `room` further tokens of each need.

        Never in more memory than before. A pool of `most` pages keeps them. Pages of a sequence keep their order; those
        of a pool that gets smaller are renumbered.
        """
        if self.contiguous:
            return Pages(self.slots, min(self.size, max(1, *lengths) + room), self.total, True, self.limit)
        new = deepcopy(self)
        for slot, length in enumerate(lengths):
            new.release(slot, length)
        used = new.total - len(new.free)
        total = max(1, used + sum(new._missing(slot, n + room) for slot, n in enumerate(lengths) if n))
        if new.most is None and total < new.total:  # memory of the same size keeps its numbers
            numbers = count()
            new.held = [list(islice(numbers, len(pages))) for pages in new.held]
            new.total, new.free = total, list(range(used, total))[::-1]
        return new


def _exactly(now: int, needed: int, most: int | None) -> int:
    return max(now, needed)  # `most` was checked: no more is needed


def _doubled(now: int, needed: int, most: int | None) -> int:
    while now < needed:
        now *= 2
    return now if most is None else min(now, most)
