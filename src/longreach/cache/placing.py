"""Find the slots of a pass's rows and their places in memory, for all layers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from longreach.cache.append import Placement
from longreach.cache.layouts import Layouts
from longreach.ops.types import RowRange


def placements(
    layouts: Layouts,
    page: int | None,
    slots: Sequence[int],
    seq: Tensor,
    pos: Tensor,
    before: Sequence[int],
    added: Sequence[int],
    runs: Sequence[RowRange] | None,
) -> tuple[Placement, ...]:
    """Of rows at positions pos [R] of the sequences seq [R] of `slots`: one for all layers, or one for each.

    page: see `places`; before, added: tokens of each sequence before the pass, and new ones; runs: the rows by
    position, described on the host.
    """
    groups, device, count = layouts.groups(), pos.device, pos.shape[0]
    if len(groups) > 1 and count % 2:  # a row more: each group begins at a multiple of 16 bytes, as one alone does
        seq, pos = torch.cat([seq, seq[-1:]]), torch.cat([pos, pos[-1:]])
    table = layouts.tables(slots).to(device)
    dropped = [[layout.dropped[s] for s in slots] for layout in groups]
    slot = pos.expand(len(groups), -1)
    if any(map(any, dropped)):
        slot = slot - torch.tensor(dropped, device=device)[:, seq]
    after = torch.tensor(before, dtype=torch.int64) + torch.tensor(added, dtype=torch.int64)
    seq_lens = pad(after - torch.tensor(dropped, dtype=torch.int64), (0, len(slots) % 2)).to(device)
    where, offset = places(table, seq, slot, page)
    found = []
    for g, (layout, gone) in enumerate(zip(groups, dropped, strict=True)):
        width = layout.width(slots)
        starts = tuple(n - d for n, d in zip(before, gone, strict=True))
        mine = None if runs is None else tuple(r._replace(first=(r.first or 0) - gone[r.seq]) for r in runs)
        place = (slot[g, :count], where[g, :count], offset[g, :count], seq_lens[g, : len(slots)], table[g, :, :width])
        found.append(Placement(*place, starts, mine))
    return layouts.spread(found)


def places(table: Tensor, seq: Tensor, slot: Tensor, page: int | None) -> tuple[Tensor, Tensor]:
    """(page, offset) in memory, int64 [groups, R], of logical slots [groups, R] of the sequences seq [R].

    table: [groups, B, pages], contiguous. page: slots in a page; None: a sequence has one page, of any size.
    """
    if page is None:
        return table[:, seq, 0], slot
    return table.flatten(1).gather(1, seq * table.shape[2] + slot // page), slot % page


def sequences_and_positions(
    counts: Sequence[int], pos: Tensor | None, firsts: Sequence[int] | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """int64 [R] each, of a pass with counts[b] rows of sequence b, at `pos` [R] or from position firsts[b] on."""
    seq = torch.arange(len(counts), device=device)
    single, each = all(count == 1 for count in counts), None  # single: a decode step
    if not single:
        each = torch.tensor(counts, dtype=torch.int64, device=device)
        seq = torch.repeat_interleave(seq, each, output_size=sum(counts))
    if pos is not None:
        return seq, pos
    assert firsts is not None
    start = torch.tensor(firsts, dtype=torch.int64, device=device)
    if each is None:
        return seq, start
    shift = start - torch.cumsum(each, 0) + each
    return seq, torch.arange(sum(counts), device=device) + shift[seq]
