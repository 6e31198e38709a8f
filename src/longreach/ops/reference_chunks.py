"""Shared by the reference implementations: a walk over rows, one sequence at a time, in bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.types import KVView, Rows

SCORES_AT_ONCE = 1 << 24  # logits held at a time, at most: launching a GPU's kernels then takes no longer than they do
IN_CACHE = 1 << 20  # of them on a CPU: fp32 of these stay in its cache


def at_once(device: torch.device) -> int:
    """Logits that are held at a time."""
    return min(SCORES_AT_ONCE, IN_CACHE) if device.type == "cpu" else SCORES_AT_ONCE


def steps(rows: Rows, kv: KVView) -> list[Tensor]:
    """Row indices in steps of one sequence each, by position, so that a step reaches no further than it must."""
    found, scores = [], at_once(rows.q.device)
    for seq in rows.seq.unique().tolist():
        mine = (rows.seq == seq).nonzero()[:, 0]
        mine = mine[rows.pos[mine].argsort()]
        found += mine.split(max(1, scores // (max(1, int(kv.seq_lens[seq])) * rows.q.shape[1])))
    return found


def reach(rows: Rows, kv: KVView) -> int:
    """Slots [0, reach) hold all keys visible to these rows (of one sequence)."""
    filled = int(kv.seq_lens[rows.seq[0]])
    return filled if kv.slot_pos is not None else max(0, min(filled, int(rows.pos.max()) + 1))


def past_reach(rows: Rows, kv: KVView) -> Tensor:
    """bool [R, 1, N]: slots past those visible to a row, whatever their positions."""
    limit = kv.seq_lens[rows.seq.long()].long()
    if kv.slot_pos is None:
        limit = torch.minimum(limit, rows.pos.long() + 1)
    return (torch.arange(kv.capacity, device=limit.device) >= limit[:, None])[:, None]


def read(memory: Tensor, kv: KVView, seq: Tensor, slots: Tensor, heads: slice, dtype: torch.dtype) -> Tensor:
    """[g, n, D]: keys or values (`memory` is kv.k or kv.v) of one sequence at ascending `slots` [n]."""
    if slots.numel():
        first, last = int(slots[0]), int(slots[-1])
        if last - first + 1 == slots.numel() and first // kv.page == last // kv.page:  # one run in one page: no copy
            page = int(seq) if kv.block_table is None else int(kv.block_table[seq, first // kv.page])
            start = first % kv.page
            return memory[page, heads, start : start + slots.numel()].to(dtype)
    pages, offsets = kv.locate(seq, slots)
    return memory[pages, heads, offsets].transpose(0, 1).to(dtype)


def logits(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[h, r, n] from q [r, h, D] and k [g, n, D], h = g * group: softcap(scale * q.k)."""
    rows, heads, dim = q.shape
    grouped = q.reshape(rows, k.shape[0], -1, dim).permute(1, 2, 0, 3).reshape(k.shape[0], -1, dim)
    x = (grouped * scale) @ k.transpose(1, 2)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    return x.view(heads, rows, -1)
