"""The memory that nearest searches: the last queries of each sequence, with their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.ops.types import FLOATS, accumulator, describe, require

DEEPEST = 32767  # depths are counted no further


@dataclass(frozen=True)
class Ring:
    """The rows of each sequence that may be matched, S sequences, C rows of each: the row at position p lies at p % C.

    A row is present if its stamp is its position. Other entries may hold anything, NaN too.
    query: [S, H, C, D] float; stamp: int32 [S, C], the row's position, -1 for none.
    depth: int16 [S, H, C], how many reuses a row's entry descends from, 0 if it is exact (DEEPEST: that or more).
    credit: fp32 (fp64 for fp64 queries) [S, G, C], the profit guard's account after the row, see `Rule`; inf: full.
    arrivals: int32 [S, G], zero between calls: where programs of a kernel count who is done.
    """

    query: Tensor
    stamp: Tensor
    depth: Tensor
    credit: Tensor
    arrivals: Tensor

    def __post_init__(self) -> None:
        query, stamp, depth, credit, arrivals = self.query, self.stamp, self.depth, self.credit, self.arrivals
        ok = isinstance(query, Tensor) and query.dim() == 4 and query.dtype in FLOATS
        require(ok, f"query: expected float [S, H, C, D], got {describe(query)}")
        sequences, heads, size, _ = query.shape
        ok = isinstance(stamp, Tensor) and stamp.shape == (sequences, size) and stamp.dtype == torch.int32
        require(ok, f"stamp: expected int32 {[sequences, size]}, got {describe(stamp)}")
        ok = isinstance(depth, Tensor) and depth.shape == query.shape[:3] and depth.dtype == torch.int16
        require(ok, f"depth: expected int16 {[sequences, heads, size]}, got {describe(depth)}")
        ok = isinstance(credit, Tensor) and credit.dim() == 3 and credit.dtype == accumulator(query.dtype)
        ok = ok and credit.shape[::2] == (sequences, size) and heads % max(1, credit.shape[1]) == 0
        require(ok, f"credit: expected {accumulator(query.dtype)} [{sequences}, G, {size}], got {describe(credit)}")
        ok = isinstance(arrivals, Tensor) and arrivals.shape == credit.shape[:2] and arrivals.dtype == torch.int32
        require(ok, f"arrivals: expected int32 {list(credit.shape[:2])}, got {describe(arrivals)}")
        for name in ("query", "stamp", "depth", "credit", "arrivals"):
            x = getattr(self, name)
            require(x.device == query.device, f"{name}: expected on {query.device} like query, got {describe(x)}")
            require(x.is_contiguous(), f"{name}: expected contiguous memory, got strides {x.stride()}")

    @classmethod
    def new(cls, sequences: int, kv_heads: int, query: tuple[int, int, int], like: Tensor) -> Ring:
        """An empty ring. query: (H, C, D); like: a tensor of the queries' dtype and device."""
        heads, size, dim = query
        device, wide = like.device, accumulator(like.dtype)
        return cls(
            like.new_empty(sequences, heads, size, dim),
            torch.full((sequences, size), -1, dtype=torch.int32, device=device),
            torch.zeros(sequences, heads, size, dtype=torch.int16, device=device),
            like.new_empty(sequences, kv_heads, size, dtype=wide),
            torch.zeros(sequences, kv_heads, dtype=torch.int32, device=device),
        )

    @property
    def size(self) -> int:
        """C, the rows of a sequence that it holds."""
        return self.query.shape[2]

    @property
    def heads(self) -> int:
        """H, query heads."""
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.credit.shape[1]
