"""Chunks kept in host memory from which a GPU can copy at full speed, the longest unused leaving first."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass, fields
from itertools import accumulate

import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.store.key import Chunk, ChunkKey

GIB = 1 << 30


@dataclass(frozen=True, eq=False, kw_only=True)
class PooledChunk(Chunk):
    """A chunk with keys and values in one piece of memory [elements], layer by layer, keys before values.

    starts: where each layer starts in it, and where the last one ends.
    """

    memory: Tensor
    starts: tuple[int, ...]


class ChunkPool:
    """Chunks in page-locked host memory, which copies to a GPU need to overlap with its kernels (A3, section 4).

    max_bytes: of the chunks held. One that is in use stays valid when it leaves the pool. pinned: whether memory is
    page-locked; by default where there is a CUDA device. Page-locked memory is given out in powers of two: a chunk
    takes up to twice its bytes, and counts by what it takes. May be shared by threads and by several `Documents`.
    Warns, once, of a chunk that is larger than the pool and so stays in memory that is not page-locked.

    Raises InvalidInput for a cap that is not a positive number of bytes.
    """

    def __init__(self, max_bytes: int = 8 * GIB, *, pinned: bool | None = None):
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise InvalidInput(f"max_bytes: expected a number of bytes, at least 1, got {max_bytes!r}")
        self.max_bytes = max_bytes
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        self.bytes = self.hits = self.misses = 0
        self._held: OrderedDict[ChunkKey, PooledChunk] = OrderedDict()
        self._lock, self._warned = threading.Lock(), False

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: ChunkKey) -> PooledChunk | None:
        """The chunk, if it is held; a use of it."""
        with self._lock:
            chunk = self._held.get(key)
            if chunk is None:
                self.misses += 1
                return None
            self.hits += 1
            self._held.move_to_end(key)
            return chunk

    def add(self, chunk: Chunk) -> Chunk:
        """The chunk in the pool's memory, replacing one of its key; the given chunk if it is larger than the pool."""
        size = self._size(chunk)
        if size > self.max_bytes:
            self._warn(size)
            return chunk
        with self._lock:
            self._drop(chunk.key)
            while self.bytes + size > self.max_bytes:
                self._drop(next(iter(self._held)))
            held = self._held[chunk.key] = pooled(chunk, self.pinned)
            self.bytes += size
        return held

    def _warn(self, size: int) -> None:
        if self.pinned and not self._warned:
            self._warned = True
            warnings.warn(
                f"a chunk takes {size} bytes and the pool holds {self.max_bytes}: the chunk is not page-locked, so "
                f"prompts with it copy keys and values without overlap; raise ChunkPool(max_bytes=...) or make chunks "
                f"smaller",
                stacklevel=3,
            )

    def clear(self) -> None:
        """Hold nothing."""
        with self._lock:
            self._held.clear()
            self.bytes = 0

    def _drop(self, key: ChunkKey) -> None:
        chunk = self._held.pop(key, None)
        if chunk is not None:
            self.bytes -= self._size(chunk)

    def _size(self, chunk: Chunk) -> int:
        return 1 << (chunk.bytes - 1).bit_length() if self.pinned else chunk.bytes


def pooled(chunk: Chunk, pinned: bool) -> PooledChunk:
    """A copy of the chunk in one piece of memory."""
    pairs = list(zip(chunk.keys, chunk.values, strict=True))
    starts = (0, *accumulate(k.numel() + v.numel() for k, v in pairs))
    memory = torch.empty(starts[-1], dtype=chunk.keys[0].dtype, pin_memory=pinned)
    keys, values = list[Tensor](), list[Tensor]()
    for start, (k, v) in zip(starts, pairs, strict=False):
        middle = start + k.numel()
        keys.append(memory[start:middle].view(k.shape).copy_(k))
        values.append(memory[middle : middle + v.numel()].view(v.shape).copy_(v))
    rest = {f.name: getattr(chunk, f.name) for f in fields(Chunk) if f.name not in ("keys", "values")}
    return PooledChunk(keys=tuple(keys), values=tuple(values), memory=memory, starts=starts, **rest)
