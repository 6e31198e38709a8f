"""The tokens of one pass: which of them are real, to which sequence each belongs, and its position there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.ops.types import describe, require


@dataclass(frozen=True)
class Tokens:
    """Real tokens of a pass, packed [R] from a rectangle [B, T].

    seq: int64 [R], the sequence of each token; a document of a packed row is a sequence of its own.
    pos: int64 [R], its position in that sequence. longest: tokens that the longest sequence has after the pass.
    shape: (B, T). real: bool [B, T], False for padding; None if all tokens are real.
    counts: tokens of each sequence; they follow each other in the order of sequences. fresh: whether every sequence
    begins in this pass. first_position: int64 [sequences], the position by which each sequence's first token is
    rotated; None if it is 0 in all.
    """

    seq: Tensor
    pos: Tensor
    counts: tuple[int, ...]
    longest: int
    shape: tuple[int, int]
    real: Tensor | None = None
    fresh: bool = True
    first_position: Tensor | None = None

    @classmethod
    def of(cls, shape: tuple[int, int], device: torch.device | str, *, mask: Tensor | None = None,
           position_ids: Tensor | None = None, past: Tensor | None = None,
           first_position: Tensor | None = None) -> Tokens:  # fmt: skip
        """Tokens of a pass of a model.

        mask: [B, T] of the new tokens, 0 for padding, else None. position_ids: int [1 or B, T]. Those of a row begin
        anywhere and ascend by 1; without a past they may restart at 0 within a row: packed documents.
        past: int64 [B], real tokens of each row so far; first_position: of these rows.
        Waits for the device if a mask or position ids are given. Raises InvalidInput for shapes and positions that do
        not fit.
        """
        batch, length = shape
        row = torch.arange(batch, device=device)[:, None].expand(shape)
        real = None
        if mask is not None:
            ok = mask.shape == torch.Size(shape)
            require(ok, lambda: f"attention_mask: expected [B, T]={list(shape)}, got {describe(mask)}")
            real = mask.to(device).bool()
            real = None if bool(real.all()) else real
        keep = torch.ones(shape, dtype=torch.bool, device=device) if real is None else real
        before = torch.zeros(batch, dtype=torch.int64, device=device) if past is None else past.to(device)
        pos = before[:, None] + keep.long().cumsum(1) - 1
        fresh, sequences, seq = past is None, batch, row[keep]
        pos = pos[keep]
        if position_ids is not None:
            given = position_ids.to(device).long().expand(shape)[keep]
            starts = (pos == 0) | (given == 0)
            if past is None and bool((starts & (pos > 0)).any()):
                seq = starts.long().cumsum(0) - 1
                begin = starts.nonzero()[:, 0]
                pos = torch.arange(len(seq), device=device) - begin[seq]
                sequences = len(begin)
            first = torch.zeros(sequences, dtype=torch.int64, device=device).scatter(0, seq, given - pos)
            if past is not None:
                first = torch.where(before > 0, 0 if first_position is None else first_position, first)
            require(
                torch.equal(given, first[seq] + pos),
                "position_ids: expected to ascend by 1 within a row, from its cached tokens on, and to restart at 0 "
                "only, in a pass without a cache",
            )
            first_position = first
        if real is None and sequences == batch:
            counts = [length] * batch
        else:
            counts = torch.bincount(seq, minlength=sequences).tolist()
        longest = max(counts, default=0) if past is None else int(pos.max()) + 1 if pos.numel() else 0
        return cls(seq, pos, tuple(counts), longest, (batch, length), real, fresh, first_position)

    @property
    def rotary_pos(self) -> Tensor:
        """int64 [R], the position by which each token is rotated."""
        return self.pos if self.first_position is None else self.pos + self.first_position[self.seq]

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return len(self.counts)

    @property
    def rectangular(self) -> bool:
        """Whether row b of the rectangle is sequence b, with no padding."""
        return self.real is None and self.sequences == self.shape[0]

    def rows(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> the real tokens [R, ...]."""
        return x.flatten(0, 1) if self.real is None else x[self.real]

    def rectangle(self, x: Tensor) -> Tensor:
        """[R, ...] -> [B, T, ...], zeros for padding."""
        if self.real is None:
            return x.unflatten(0, self.shape)
        where = self.real.flatten().nonzero()[:, 0]
        full = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return full.index_copy(0, where, x).unflatten(0, self.shape)
