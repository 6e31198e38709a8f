"""Where the keys of a pass lie: each sequence begins at a block's edge, so that blocks are cut at its own positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.mka.tokens import Tokens
from longreach.ops.types import KVView, RowRange, Rows


@dataclass(frozen=True)
class Layout:
    """Slots of the rows of a pass over fresh sequences, in memory of the pass.

    Row b of an unpadded rectangle is sequence b of the memory. Otherwise all sequences lie one behind the other in a
    single sequence of the memory, each from a multiple of `block` on; the slots between them stay unread.

    seq, slot, start: int64 [R], sequence of the memory, slot, and slot of the sequence's first token; start is None
    where all begin at slot 0. shape: (sequences of the memory, slots of each). first: int64 [P, n], the position by
    which each block's first key is rotated.
    """

    tokens: Tokens
    seq: Tensor
    slot: Tensor
    start: Tensor | None
    shape: tuple[int, int]
    first: Tensor

    @classmethod
    def of(cls, tokens: Tokens, block: int) -> Layout:
        """The layout of a pass without a past. No wait for the device."""
        device = tokens.seq.device
        if tokens.rectangular:
            batch, length = tokens.shape
            first = block_positions(batch, length, block, tokens.first_position, device)
            return cls(tokens, tokens.seq, tokens.pos, None, tokens.shape, first)
        lengths = torch.zeros(tokens.sequences, dtype=torch.int64, device=device)
        lengths = lengths.index_add(0, tokens.seq, torch.ones_like(tokens.pos))
        taken = (lengths + block - 1) // block * block
        start = (taken.cumsum(0) - taken)[tokens.seq]
        units = len(tokens.seq) // block + tokens.sequences  # at most: every sequence wastes less than a block
        first = torch.zeros(1, units, dtype=torch.int64, device=device)
        first[0, (start + tokens.pos) // block] = tokens.rotary_pos - tokens.pos % block
        return cls(tokens, torch.zeros_like(tokens.seq), start + tokens.pos, start, (1, units * block), first)

    def rows(self, q: Tensor) -> Rows:
        """q [R, H, D] -> Rows of the memory."""
        runs = None
        if self.start is None:
            runs = tuple(RowRange(self.shape[1], number, 0) for number in range(self.shape[0]))
        return Rows(q, self.seq, self.slot, runs)

    def view(self, k: Tensor, v: Tensor) -> KVView:
        """k, v [R, G, D] -> the memory of the pass; gradients flow. No copy for an unpadded rectangle."""
        lens = torch.full((self.shape[0],), self.shape[1], dtype=torch.int64, device=k.device)
        return KVView(self._memory(k), self._memory(v), lens)

    def _memory(self, x: Tensor) -> Tensor:
        if self.start is None:
            return x.unflatten(0, self.shape).transpose(1, 2)
        full = x.new_zeros(self.shape[1], *x.shape[1:]).index_copy(0, self.slot, x)
        return full.transpose(0, 1)[None]


def block_positions(
    sequences: int, length: int, block: int, first: Tensor | None, device: torch.device | str
) -> Tensor:
    """int64 [sequences, n], the position by which each complete block's first key is rotated. Slots begin at 0.

    first: int64 [sequences], the position of each sequence's first key; None for 0.
    """
    edges = torch.arange(0, length - length % block, block, device=device).expand(sequences, -1)
    return edges if first is None else edges + first[:, None]
