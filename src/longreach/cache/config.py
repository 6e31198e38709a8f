"""The options of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longreach.cache.pages import Pages
from longreach.ops.types import require


@dataclass(frozen=True)
class CacheConfig:
    """Layout and growth of KV memory. Growth moves one layer at a time, so only that layer exists twice.

    kind: "contiguous" (one buffer a sequence) or "paged" (pages of `page` tokens from a pool, one pool a layer).
    capacity: the most tokens a sequence may hold in each layer, allocated at once. Memory shrinks only on eviction.
        None: generate reserves prompt and longest answer at once. Otherwise memory starts at 256 tokens, and doubles
        between steps by copying.
    page: tokens in a page (paged). pages: pages in the pool, allocated at once; None: the pool doubles.
    """

    kind: Literal["contiguous", "paged"] = "contiguous"
    capacity: int | None = None
    page: int = 64
    pages: int | None = None

    def __post_init__(self) -> None:
        require(self.kind in ("contiguous", "paged"), f"kind: expected 'contiguous' or 'paged', got {self.kind!r}")
        for name, value in (("capacity", self.capacity), ("page", self.page), ("pages", self.pages)):
            count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(count or (value is None and name != "page"), f"{name}: expected a count >= 1, got {value!r}")
        require(self.pages is None or self.kind == "paged", "pages: only a paged cache has a pool of pages")

    def plan(self, slots: int) -> Pages:
        if self.kind == "contiguous":
            return Pages(slots, self.capacity or 256, slots, True, limit=self.capacity)
        total = self.pages or slots * -(-(self.capacity or 256) // self.page)
        return Pages(slots, self.page, total, False, limit=self.capacity, most=self.pages)
