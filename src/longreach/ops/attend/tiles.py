"""Tiles: rows of one sequence (and one list) that read their keys together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.ops.selection import Lists, PackedLists, Selection
from longreach.ops.types import KVView, Rows


@dataclass(frozen=True)
class Tiles:
    """`count` tiles of up to `size` rows.

    table: int32 [count, size] of row numbers, -1 where there is none; None where rows come in runs of `width`, each
    cut into tiles from its start.
    """

    count: int
    size: int
    width: int = 1
    table: Tensor | None = None


def tiles_of(rows: Rows, kv: KVView, selection: Selection, *, most: int) -> Tiles:
    """Tiles of at most `most` rows. Their number is known on the host; no device sync."""
    count = rows.q.shape[0]
    listed = isinstance(selection, (Lists, PackedLists))
    shared = selection.row_to_list if isinstance(selection, (Lists, PackedLists)) else None
    if most == 1 or (listed and shared is None):
        return Tiles(count, 1)
    if rows.runs is not None and not listed:
        widths = [run.rows for run in rows.runs if run.rows]
        if len(set(widths)) == 1:
            size = min(widths[0], most)
            return Tiles(len(widths) * -(-widths[0] // size), size, widths[0])
        return _cut(widths, min(max(widths), most), rows.q.device)
    if not listed and count <= kv.sequences:
        return Tiles(count, 1)
    groups = most_groups = kv.sequences
    key = rows.seq.long()
    if isinstance(selection, (Lists, PackedLists)) and shared is not None:
        groups = _lists_of(selection)  # a list is made for rows of one sequence, as a rule
        key, most_groups = shared.long() * kv.sequences + key, kv.sequences * groups
    size = min(most, 1 << (max(1, -(-count // max(1, groups))) - 1).bit_length())
    return _sorted(key, rows.pos.long(), min(most_groups, count), size)


def _lists_of(selection: Lists | PackedLists) -> int:
    """How many lists each entry of the head axis has."""
    if isinstance(selection, Lists):
        return selection.index.shape[0]
    return (selection.offsets.shape[0] - 1) // selection.heads


def _cut(widths: list[int], size: int, device: torch.device) -> Tiles:
    """Runs of these widths, each cut into tiles."""
    table, start = [], 0
    for width in widths:
        row = torch.arange(-(-width // size) * size)
        table.append(torch.where(row < width, row + start, -1).view(-1, size))
        start += width
    whole = torch.cat(table).int().to(device)
    return Tiles(whole.shape[0], size, table=whole)


def sorted_tiles(seq: Tensor, pos: Tensor, groups: int, size: int) -> Tensor:
    """int32 [tiles, size] of row numbers, -1 for none: rows of at most `groups` sequences, by sequence and position."""
    table = _sorted(seq.long(), pos.long(), groups, size).table
    assert table is not None
    return table


def _sorted(key: Tensor, pos: Tensor, groups: int, size: int) -> Tiles:
    """Rows sorted by key and position on the device; a tile ends where `size` rows or its key end."""
    count = key.shape[0]
    key, order = (key * 2**31 + pos.clamp(0, 2**31 - 1)).sort(stable=True)
    key = key // 2**31
    number = torch.arange(count, device=key.device)
    fresh = torch.ones_like(key, dtype=torch.bool)
    fresh[1:] = key[1:] != key[:-1]
    since = number - torch.where(fresh, number, 0).cummax(0).values
    tile = (since % size == 0).cumsum(0) - 1
    tiles = count // size + groups  # every group leaves at most one tile that is not full
    table = torch.full((tiles, size), -1, dtype=torch.int32, device=key.device)
    table[tile, since % size] = order.int()
    return Tiles(tiles, size, table=table)
