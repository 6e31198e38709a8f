"""The state of running means between passes: of a scan, or in memory that every pass writes in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.ops.types import INTS, describe, require


@dataclass(frozen=True)
class ScanCarry:
    """The state of a scan after some tokens of each sequence.

    mean: [B, G, D], the running mean at the last token; weight: [B, G], the sum of the weights in it. Both fp32 (fp64
    for fp64 inputs). Before the first token: mean 0, weight 0.
    """

    mean: Tensor
    weight: Tensor

    def __post_init__(self) -> None:
        mean, weight = self.mean, self.weight
        ok = isinstance(mean, Tensor) and mean.dim() == 3 and mean.dtype in (torch.float32, torch.float64)
        require(ok, lambda: f"mean: expected fp32 (or fp64) [B, G, D], got {describe(mean)}")
        ok = isinstance(weight, Tensor) and weight.shape == mean.shape[:2]
        ok = ok and weight.dtype == mean.dtype and weight.device == mean.device
        require(
            ok, lambda: f"weight: expected {list(mean.shape[:2])} with dtype and device of mean, got {describe(weight)}"
        )

    @classmethod
    def empty(
        cls,
        sequences: int,
        heads: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ScanCarry:
        """The state before the first token."""
        mean = torch.zeros(sequences, heads, dim, dtype=dtype, device=device)
        return cls(mean, torch.zeros(sequences, heads, dtype=dtype, device=device))


@dataclass(frozen=True)
class CarryMemory:
    """Carries of all sequences in memory, several entries of each slot, and the entries that one pass reads and writes.

    mean: [S, E, G, D], weight: [S, E, G], as in ScanCarry, contiguous. slots: int [B], the slot of each sequence of the
    pass. before, after: int [B], the entries of its slot that hold the carry before and after the pass. Two sequences
    share no slot. On a GPU the values of integers are not checked.
    """

    mean: Tensor
    weight: Tensor
    slots: Tensor
    before: Tensor
    after: Tensor

    def __post_init__(self) -> None:
        mean, weight = self.mean, self.weight
        ok = isinstance(mean, Tensor) and mean.dim() == 4 and mean.dtype in (torch.float32, torch.float64)
        require(ok, lambda: f"mean: expected fp32 (or fp64) [S, E, G, D], got {describe(mean)}")
        ok = isinstance(weight, Tensor) and weight.shape == mean.shape[:3]
        ok = ok and weight.dtype == mean.dtype and weight.device == mean.device
        wanted = "with dtype and device of mean"
        require(ok, lambda: f"weight: expected {list(mean.shape[:3])} {wanted}, got {describe(weight)}")
        require(mean.is_contiguous() and weight.is_contiguous(), "mean, weight: expected contiguous memory")
        for name in ("slots", "before", "after"):
            x = getattr(self, name)
            ok = isinstance(x, Tensor) and x.dtype in INTS and x.dim() == 1 and x.device == mean.device
            ok = ok and x.shape == self.slots.shape
            require(ok, lambda: f"{name}: expected int32 or int64 [B] on {mean.device}, got {describe(x)}")

    @classmethod
    def copy_of(cls, carry: ScanCarry) -> CarryMemory:
        """A copy with one entry for each sequence, which a pass reads and overwrites."""
        slots = torch.arange(len(carry.mean), device=carry.mean.device)
        zeros = torch.zeros_like(slots)
        mean, weight = (x.clone(memory_format=torch.contiguous_format)[:, None] for x in (carry.mean, carry.weight))
        return cls(mean, weight, slots, zeros, zeros)

    def read(self) -> ScanCarry:
        """The carry before the pass, copied."""
        return ScanCarry(self.mean[self.slots, self.before], self.weight[self.slots, self.before])

    def write(self, carry: ScanCarry) -> None:
        """Store the carry after the pass."""
        with torch.no_grad():
            self.mean[self.slots, self.after] = carry.mean.detach()
            self.weight[self.slots, self.after] = carry.weight.detach()
