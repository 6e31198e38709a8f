"""The options of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longreach.cache.pages import Pages
from longreach.ops.types import require

HOST_ATTEND = ("auto", "link", "cpu")


@dataclass(frozen=True)
class CacheConfig:
    """Layout and growth of KV memory. Growth moves one layer at a time, so only that layer exists twice.

    kind: "contiguous" (one buffer a sequence) or "paged" (pages of `page` tokens from a pool, one pool a layer).
    capacity: the most tokens a sequence may hold in each layer, allocated at once. Memory shrinks only on eviction.
        None: generate reserves prompt and longest answer at once. Otherwise memory starts at 256 tokens, and doubles
        between steps by copying.
    page: tokens in a page (paged). pages: pages in the pool, allocated at once; None: the pool doubles.
    host: keep keys and values in pinned host memory, which the GPU reads in place over the link (contiguous only).
        Layers that the decode method reads whole stay in GPU memory, unless it reads all layers whole. Passes of more
        than 8 new tokens a sequence read layers in host memory through two staging buffers in GPU memory, each as large
        as one layer. Keys cannot be evicted. On a CPU layers are divided in the same way, in ordinary memory.
    host_attend: with host, how decode steps attend in layers whose keys lie in host memory. "link": the GPU reads the
        chosen keys over the link. "cpu": the CPU attends within the step; this needs a CUDA device and Numba. "auto":
        the faster of both, measured before an answer of at least 64 tokens; "link" for steps that are not captured.
    device_bytes: with host: the most GPU memory for keys, values and staging. As many layers as fit stay in GPU memory;
        those that are read whole go first. None: only those that are read whole stay there. A method's own data, such
        as MagicPIG's tables or Quest's page bounds, lies in GPU memory and is not limited by it.
    """

    kind: Literal["contiguous", "paged"] = "contiguous"
    capacity: int | None = None
    page: int = 64
    pages: int | None = None
    host: bool = False
    host_attend: Literal["auto", "link", "cpu"] = "auto"
    device_bytes: int | None = None

    def __post_init__(self) -> None:
        require(self.kind in ("contiguous", "paged"), f"kind: expected 'contiguous' or 'paged', got {self.kind!r}")
        for name in ("capacity", "page", "pages", "device_bytes"):
            value = getattr(self, name)
            count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(count or (value is None and name != "page"), f"{name}: expected a count >= 1, got {value!r}")
        require(self.pages is None or self.kind == "paged", "pages: only a paged cache has a pool of pages")
        require(isinstance(self.host, bool), f"host: expected True or False, got {self.host!r}")
        known = self.host_attend in HOST_ATTEND
        require(known, f"host_attend: expected one of {', '.join(HOST_ATTEND)}, got {self.host_attend!r}")
        require(
            self.host or self.host_attend == "auto",
            "host_attend: is for keys and values in host memory; give host=True too, or leave it out",
        )
        require(
            not self.host or self.kind == "contiguous",
            "host: expected kind='contiguous', as paged memory cannot lie in host memory; leave kind out, or host",
        )
        require(
            self.host or self.device_bytes is None,
            "device_bytes: limits the GPU memory of a cache with host=True; give host=True too, or leave it out",
        )

    def plan(self, slots: int) -> Pages:
        if self.kind == "contiguous":
            return Pages(slots, self.capacity or 256, slots, True, limit=self.capacity)
        total = self.pages or slots * -(-(self.capacity or 256) // self.page)
        return Pages(slots, self.page, total, False, limit=self.capacity, most=self.pages)
