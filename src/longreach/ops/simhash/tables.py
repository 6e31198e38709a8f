"""The memory of hash tables, and the random directions of their codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longreach.ops.directions import directions
from longreach.ops.simhash.probability import MOST_BITS, check_law
from longreach.ops.types import describe, require

MOST_SEGMENT = 1 << 16  # positions that 16-bit ids can name


def projections(dim: int, bits: int, tables: int, seed: int) -> Tensor:
    """The directions whose signs make the codes: bf16 [tables, bits, dim], on the CPU, shared by all heads.

    Standard normal, the same for one seed on every device and platform (`ops.directions`). seed: in [0, 2^32).
    """
    check_law(bits, tables, 1)
    require(isinstance(dim, int) and dim >= 1, lambda: f"dim: expected an int >= 1, got {dim!r}")
    return directions(tables, bits, dim, seed=seed)


@dataclass(frozen=True)
class HashTables:
    """Hash tables of B sequences, in memory given by the caller. A bucket holds the keys that have its code.

    Positions are cut into segments: segment s holds positions [s size, (s + 1) size). In each segment, KV head and
    table, bucket c holds entries ids[offsets[c] : offsets[c + 1]] of the segment's columns.

    ids: uint16 [B, G, tables, N], position - s size of each key, ascending within a bucket. N: positions a sequence can
        have; segment s has columns [s size, (s + 1) size).
    offsets: [B, G, tables, ceil(N / size), 2^bits + 1], uint16, or int32 if size is 65,536.
    stop: int32 [B]. Positions [first, stop) are in the tables. `build` raises it. The owner may lower it: keys at
        and past it are then never returned, and the next `build` continues there. With stop <= first a sequence has no
        keys, whatever ids and offsets hold.
    first: positions below it are never in the tables (sink tokens).
    inverse_norms: fp32 [B, G, N], 1 over the norm of each key less its centre; 0 if that is 0 or not finite. `seal`
        writes it with the keys, `build` does not. Triton's attend_sampled reads it.
    ids and offsets may be strided views whose last dimension is contiguous, such as one layer of a larger tensor.
    torch cannot index_put uint16: view it as int16 to move slots.
    """

    ids: Tensor
    offsets: Tensor
    stop: Tensor
    size: int
    first: int = 0
    inverse_norms: Tensor | None = None

    def __post_init__(self) -> None:
        ids, offsets, stop, size = self.ids, self.offsets, self.stop, self.size
        ok = isinstance(size, int) and not isinstance(size, bool) and 8 <= size <= MOST_SEGMENT and size % 8 == 0
        require(ok, lambda: f"size: expected a multiple of 8 in [8, {MOST_SEGMENT}], got {size!r}")
        ok = isinstance(self.first, int) and not isinstance(self.first, bool) and self.first >= 0
        require(ok, lambda: f"first: expected a position >= 0, got {self.first!r}")
        ok = isinstance(ids, Tensor) and ids.dtype == torch.uint16 and ids.dim() == 4 and ids.shape[3] >= 1
        require(ok, lambda: f"ids: expected uint16 [B, G, tables, N], got {describe(ids)}")
        shape = (*ids.shape[:3], -(-ids.shape[3] // size))
        ok = isinstance(offsets, Tensor) and offsets.dtype == offset_dtype(size) and offsets.shape[:-1] == shape
        ok = ok and offsets.dim() == 5 and offsets.shape[4] - 1 in [1 << bits for bits in range(1, MOST_BITS + 1)]
        require(
            ok,
            lambda: (
                f"offsets: expected {offset_dtype(size)} [*{list(shape)}, 2^bits + 1] with bits in [1, {MOST_BITS}], "
                f"got {describe(offsets)}"
            ),
        )
        check_law(self.bits, self.tables, 1)
        ok = isinstance(stop, Tensor) and stop.dtype == torch.int32 and stop.shape == ids.shape[:1]
        require(ok, lambda: f"stop: expected int32 [B={ids.shape[0]}], got {describe(stop)}")
        for name, x in (("offsets", offsets), ("stop", stop)):
            require(x.device == ids.device, lambda: f"{name}: expected on {ids.device} like ids, got {describe(x)}")
        norms, shape = self.inverse_norms, (*ids.shape[:2], ids.shape[3])
        ok = norms is None or (norms.dtype == torch.float32 and norms.shape == shape and norms.device == ids.device)
        ok = ok and (norms is None or norms.stride(2) == 1)
        require(
            ok,
            lambda: (
                f"inverse_norms: expected fp32 {list(shape)} on {ids.device}, the last dimension contiguous, got "
                f"{describe(norms)}"
            ),
        )
        contiguous = ids.stride(3) == 1 and offsets.stride(4) == 1
        require(contiguous, "ids, offsets: expected a contiguous last dimension")

    @classmethod
    def empty(
        cls,
        sequences: int,
        heads: int,
        capacity: int,
        *,
        bits: int,
        tables: int,
        size: int = MOST_SEGMENT,
        first: int = 0,
        device: torch.device | str = "cpu",
    ) -> HashTables:
        """Tables without keys for `capacity` positions a sequence.

        Their memory on a CPU comes from NumPy, which asks for huge pages: look-ups miss the TLB without them.
        """
        check_law(bits, tables, 1)
        ok = isinstance(size, int) and 8 <= size <= MOST_SEGMENT
        require(ok, lambda: f"size: expected a multiple of 8 in [8, {MOST_SEGMENT}], got {size!r}")
        require(isinstance(capacity, int) and capacity >= 1, lambda: f"capacity: expected >= 1, got {capacity!r}")
        shape = (sequences, heads, tables)
        ids = _memory((*shape, capacity), torch.uint16, device)
        offsets = _memory((*shape, -(-capacity // size), (1 << bits) + 1), offset_dtype(size), device)
        stop = torch.full((sequences,), first, dtype=torch.int32, device=device)
        return cls(ids, offsets, stop, size, first, torch.zeros(sequences, heads, capacity, device=device))

    @property
    def bits(self) -> int:
        """Signs in a code."""
        return (self.offsets.shape[4] - 1).bit_length() - 1

    @property
    def tables(self) -> int:
        """Tables of each sequence and KV head."""
        return self.ids.shape[2]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.ids.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of memory: B G tables (2 N + segments (2^bits + 1) times 2, or 4 if size is 65,536) + 4 B, and 4 B G N
        of inverse norms.
        """
        parts = (self.ids, self.offsets, self.stop, self.inverse_norms)
        return sum(x.numel() * x.element_size() for x in parts if x is not None)


def offset_dtype(size: int) -> torch.dtype:
    """The dtype of offsets into a segment of `size` positions: they reach `size` itself."""
    return torch.uint16 if size < MOST_SEGMENT else torch.int32


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(math.prod(shape), np.uint16 if dtype == torch.uint16 else np.int32)).view(shape)
