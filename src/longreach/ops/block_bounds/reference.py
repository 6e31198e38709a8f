"""Bounds of blocks in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.types import KVView, Rows, accumulator

AT_ONCE = 1 << 24  # values gathered at a time


def bound_blocks(
    kv: KVView, low: Tensor, high: Tensor, seq: Tensor, block: Tensor, per: int, *, in_slots: bool
) -> None:
    """in_slots: `block` holds slots; each stands for the block of slot min(slot, filled - 1)."""
    seq, block, filled = seq.long(), block.long(), kv.seq_lens.long()
    if in_slots:
        block = torch.minimum(block, filled[seq] - 1).div(per, rounding_mode="floor")
    some = (block >= 0) & (block * per < filled[seq])
    width = min(per, kv.capacity)
    piece = max(1, AT_ONCE // (width * kv.heads * kv.k.shape[3]))
    for seq_, block_ in zip(seq[some].split(piece), block[some].split(piece), strict=True):
        slot = block_[:, None] * per + torch.arange(width, device=block_.device)
        empty = slot >= filled[seq_][:, None]
        page, offset = kv.locate(seq_[:, None], slot.masked_fill(empty, 0))
        k = kv.k[page, :, offset]  # [n, per, G, D]
        place = locate_units(kv, seq_, block_, per)
        low[place[0], :, place[1]] = k.masked_fill(empty[..., None, None], torch.inf).amin(1)
        high[place[0], :, place[1]] = k.masked_fill(empty[..., None, None], -torch.inf).amax(1)


def score_blocks(rows: Rows, kv: KVView, low: Tensor, high: Tensor, per: int, *, slot: Tensor, newest: bool) -> Tensor:
    """newest: the rows' newest blocks are bounded first."""
    if newest:
        bound_blocks(kv, low, high, rows.seq, slot, per, in_slots=True)
    dtype = accumulator(rows.q.dtype)
    scores = rows.q.new_full((rows.q.shape[0], kv.heads, -(-kv.capacity // per)), torch.nan, dtype=dtype)
    q = rows.q.to(dtype).unflatten(1, (kv.heads, -1))
    up, down = q.clamp(min=0).sum(2), q.clamp(max=0).sum(2)  # [R, G, D]
    last = torch.minimum(slot.long(), kv.seq_lens[rows.seq.long()].long() - 1).clamp(min=0)
    for r, count in enumerate((last // per).tolist()):
        blocks = torch.arange(count, device=q.device)
        page, unit = locate_units(kv, rows.seq[r].long().expand_as(blocks), blocks, per)
        least, largest = (x[page, :, unit].to(dtype) for x in (low, high))  # [blocks, G, D]
        scores[r, :, :count] = ((largest * up[r]).sum(-1) + (least * down[r]).sum(-1)).T
    return scores


def locate_units(kv: KVView, seq: Tensor, block: Tensor, per: int) -> tuple[Tensor, Tensor]:
    """Page of memory and unit in it of each block."""
    first = block * per
    page = first // kv.page
    return kv.locate(seq, first)[0], block - -(-page * kv.page // per)
