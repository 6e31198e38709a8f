"""The last rows of each sequence, with results of attention that later rows may reuse: MAC's state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.attend import Entries
from longreach.ops.match import Ring
from longreach.ops.types import KVView, Partial, accumulator, describe, require

SPARE = 8  # rows past the window: up to this many tokens can be truncated without losing rows of the window


class RowRing:
    """Queries, results and accounts of the last `window` rows of every sequence of one layer; a SequenceState.

    All buffers stay at fixed addresses on the device. ring: a `Ring` of window + SPARE rows. entries: results in fp32
    (fp64 for fp64); head h at slot n of sequence s has entry (s H + h) C + n. Position stamps decide what is valid:
    reset and truncation clear stamps, and leave the rest of the memory.
    """

    def __init__(self, slots: int, heads: int, kv_heads: int, dim: int, window: int, like: Tensor):
        """like: a tensor of the queries' dtype and device."""
        require(min(slots, heads, kv_heads, dim, window) >= 1, f"window: expected a count >= 1, got {window}")
        self.window, size = window, window + SPARE
        self.ring = Ring.new(slots, kv_heads, (heads, size, dim), like)
        count, wide = slots * heads * size, accumulator(like.dtype)
        self.entries = Entries(like.new_empty(count, dim, dtype=wide), like.new_empty(count, dtype=wide))

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of one sequence in this layer."""
        ring, entries = self.ring, self.entries
        held = (ring.query, ring.stamp, ring.depth, ring.credit, ring.arrivals, *entries)
        return sum(x.nbytes for x in held) // ring.query.shape[0]

    @property
    def nbytes(self) -> int:
        return self.bytes_per_sequence * self.ring.query.shape[0]

    def note(self, slot: Tensor, pos: Tensor, query: Tensor, entry: Partial, credit: float) -> None:
        """Store rows that attended exactly. slot, pos: int [R], at most the last `size` rows of their sequences;
        query: [R, H, D] as it is matched; entry: the result to reuse; credit: the guard's account afterwards."""
        ring, place = self.ring, pos.long() % self.ring.size
        slot = slot.long()
        with torch.no_grad():
            ring.query[slot, :, place] = query
            ring.stamp[slot, place] = pos.int()
            ring.depth[slot, :, place] = 0
            ring.credit[slot, :, place] = credit
            head = torch.arange(ring.heads, device=slot.device)
            at = (slot[:, None] * ring.heads + head) * ring.size + place[:, None]
            self.entries.out[at] = entry.out
            self.entries.lse[at] = entry.lse

    @property
    def generation(self) -> int:
        return 0  # its memory never moves

    def overwrite(self, slots: Tensor, lengths: Tensor) -> None:
        """Results over the old keys are not reused."""
        self.truncate(slots, lengths)

    def written(self, layer: int, view: KVView, seq: Tensor, slot: Tensor) -> None:
        """The rows of the pass are noted as they attend."""

    def check_keep(self, layer: int) -> None:
        """Only an empty ring permits it. Syncs with the device, as `KVCache.keep` does."""
        if bool((self.ring.stamp >= 0).any()):
            raise Unsupported(
                f"layer {layer} keeps results of attention over earlier keys (MAC's ring), which cannot be evicted "
                f"from them; evict in layers without a ring"
            )

    def kept(self, layer: int, view: KVView) -> None:
        """The ring is empty, see `check_keep`."""

    def snapshot(self) -> Callable[[], None]:
        """Copy everything; calling the result writes the copy back to the same memory."""
        held = (self.ring.query, self.ring.stamp, self.ring.depth, self.ring.credit, *self.entries)
        with torch.inference_mode(False), torch.no_grad():
            copies = [x.clone() for x in held]

        def restore() -> None:
            with torch.no_grad():
                for x, copy in zip(held, copies, strict=True):
                    x.copy_(copy)

        return restore

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> RowRing:
        ring, new = self.ring, copy.copy(self)
        with torch.inference_mode(False), torch.no_grad():
            names = ("query", "stamp", "depth", "credit", "arrivals")
            new.ring = replace(ring, **{name: getattr(ring, name)[slots] for name in names})
            each = (x.unflatten(0, (len(ring.stamp), -1))[slots].flatten(0, 1) for x in self.entries)
            new.entries = Entries(*each)
        return new

    def to_save(self) -> dict[str, Tensor]:
        """All of it: earlier queries and results are not in the cache."""
        ring = self.ring
        held = {"query": ring.query, "stamp": ring.stamp, "depth": ring.depth, "credit": ring.credit}
        return {**held, "out": self.entries.out, "lse": self.entries.lse}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        for name, x in self.to_save().items():
            got = saved[name]
            same = got.shape == x.shape and got.dtype == x.dtype
            require(same, f"ring: {name}: expected {describe(x)}, got {describe(got)}")
            with torch.no_grad():
                x.copy_(got)

    def reset(self, slots: Tensor) -> None:
        self.ring.stamp[slots] = -1

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """Any cut is possible. A cut of more than SPARE tokens leaves fewer rows than the window to match."""

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        stamp = self.ring.stamp[slots]
        self.ring.stamp[slots] = torch.where(stamp < lengths[:, None], stamp, -1)
