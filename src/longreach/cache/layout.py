"""Slots and pages of a group of layers. Host work, done between steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from longreach.cache.pages import Pages
from longreach.errors import Unsupported


@dataclass
class Layout:
    """Slots and pages of all layers that hold the same slots of every sequence.

    dropped: slots evicted from each sequence; the token at position p, appended since, is in slot p - dropped.
    evicted_at: tokens that each sequence had when keys were last evicted from it, else 0.
    """

    pages: Pages
    dropped: list[int]
    evicted_at: list[int]

    @classmethod
    def fresh(cls, pages: Pages) -> Layout:
        return cls(pages, [0] * pages.slots, [0] * pages.slots)

    def in_use(self, lengths: dict[int, int]) -> dict[int, int]:
        """Slots that sequences of `lengths` tokens use: slot -> count."""
        return {s: n - self.dropped[s] for s, n in lengths.items()}

    def width(self, slots: Iterable[int]) -> int:
        """Columns of a block table of these sequences: the most pages that one holds, at least 1."""
        return max((len(self.pages.held[s]) for s in slots), default=0) or 1

    def sizes_for(self, lengths: dict[int, int], exact: bool = False) -> tuple[int, int]:
        """Pages.sizes_for, from lengths in tokens."""
        return self.pages.sizes_for(self.in_use(lengths), exact)

    def take(self, lengths: dict[int, int], size: int, total: int) -> None:
        """Pages.take, from lengths in tokens."""
        self.pages.take(self.in_use(lengths), size, total)

    def check_cut(self, slot: int, length: int) -> None:
        """Raise Unsupported where a cut would leave a different number of keys in each head."""
        at = self.evicted_at[slot]
        if 0 < length < at:
            raise Unsupported(
                f"truncate: keys were evicted from slot {slot} at {at} tokens, so it cannot be cut to {length}: each "
                f"head would hold another number of keys. Cut to {at} tokens or more, or to 0"
            )

    def cut(self, slot: int, length: int) -> None:
        """The sequence ends after `length` tokens; its other pages go back."""
        if length == 0:
            self.dropped[slot] = self.evicted_at[slot] = 0
        self.pages.release(slot, length - self.dropped[slot])

    def evicted(self, lengths: list[int], kept: dict[int, int], room: int = 0) -> Layout:
        """The layout after eviction in sequences of `lengths` tokens: slot -> slots kept.

        Its memory is shrunk to what is kept and `room` further tokens of each sequence.
        """
        dropped, at = list(self.dropped), list(self.evicted_at)
        for slot, count in kept.items():
            dropped[slot], at[slot] = lengths[slot] - count, lengths[slot]
        pages = self.pages.shrunk([n - d for n, d in zip(lengths, dropped, strict=True)], room)
        return Layout(pages, dropped, at)
