"""Kascade's prefill: tiles of rows choose and share their keys (sections 3.4, 3.6 and 4.1).

A tile is the rows of a sequence at positions [n T, (n + 1) T), T = max(1, tile // group) tokens: cut at absolute
positions. With P = n T the tokens before it, h the query heads of KV head g and r the tile's rows:

    s[g, n] = sum_{r, h} exp(logit[r, h, n] - lse[r, h])    n < P; the lse is over all keys visible to row r
    k(P)    = min(max(floor(k P), min_keys), P)
    I[g]    = the k(P) largest of s[g, .]
    out[r]  = attention over I[g] and [P, pos(r)]

so the tile's own keys are attended to causally and do not count in k. I always holds the sinks, and the newest tokens
before the tile that `recent` covers for its first row. A tile whose k(P) is P chooses nothing: all keys are its own.

Passes of an anchor over the keys: the lse (`tile_log_sums`, K; none where the layer attends densely, as dense attention
gives the lse), the scores (`tile_scores`, K again), and attention to the chosen keys (K and V). The paper's anchors
make the same three (section 3.6). With `lse_every` = s the first pass estimates the lse from every s-th key; with
`score_every` = s the first two passes are made for every s-th row of a tile, its first one included.

Memory: tiles are scored some at a time, so that scores, top-k's scratch and the lse take at most SCRATCH bytes together
(one tile is scored whatever it takes). With the length grow the packed lists alone: 4 bytes for each key that a tile
chooses, about 0.86 GB at 128K tokens, 10% and 8 KV heads, until the next anchor's lists replace them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.methods.call import LayerCall
from longreach.methods.kascade.budget import KeyBudget
from longreach.ops import PackedLists, Rows, RowTiles, Span, Spans, TileLists, absolute
from longreach.ops.doors import Read
from longreach.ops.tile_lists import FIRST, LAST, own_keys

SCRATCH = 256 << 20  # bytes that an anchor's choice takes beside its lists
COLUMNS = 128  # scores of a tile are laid out in multiples of so many slots


class HostTiles(NamedTuple):
    """Tiles on the host. table: int64 [L, T], row numbers, -1 for none; slot: int64 [L, T], the rows' slots; start:
    int64 [L], the tokens before each tile; keys: int64 [L], those of them that it chooses, 0 if it takes all.
    short_rows: rows of tiles that begin below `dense_below`; 0 if the budget covers the keys before each of these."""

    table: Tensor
    slot: Tensor
    start: Tensor
    keys: Tensor
    short_rows: int = 0


@dataclass(frozen=True)
class PromptTiles:
    """The tiles of the rows of a pass, cut at their positions.

    tiles: with the first of a tile's own keys as start: 0 for a tile that takes all keys before it. of: int64 [R], the
    tile of each row. count: int64 [L], keys to choose. own: the keys of each row's own tile.
    """

    tiles: RowTiles
    of: Tensor
    count: Tensor
    own: Spans
    host: HostTiles

    @property
    def choosing(self) -> bool:
        """Whether any tile leaves out keys."""
        return bool((self.host.keys > 0).any())


class Scored(NamedTuple):
    """The rows that are scored. visible, before: slots that each of them sees, and those before its tile; lse_keys,
    keys_before: the number of slots that the passes read, of all rows and KV heads together. The pass for the lse may
    read a sample of `visible`."""

    tiles: RowTiles
    visible: Spans
    lse_keys: int
    before: Spans
    keys_before: int


def tiles_of(rows: Rows, tokens: int, budget: KeyBudget) -> PromptTiles:
    """The tiles of `tokens` positions that hold the rows.

    Nothing waits for the device if the host knows the rows (Rows.runs with first positions); else positions are read.
    """
    known = rows.runs is not None and all(run.first is not None for run in rows.runs)
    table, slot, start = _from_runs(rows, tokens) if known else _from_positions(rows, tokens)
    keys = budget.keys(start, start + 1)
    some = keys < start
    short_rows = _short_rows(table, start, budget)
    keys = keys.where(some, 0)
    of = torch.zeros(rows.pos.shape[0], dtype=torch.int64)
    tile, place = (table >= 0).nonzero(as_tuple=True)
    of[table[tile, place]] = tile
    numbers, first, of, count = _on_device(rows.pos.device, table, start.where(some, 0), of, keys)
    tiles = RowTiles(numbers.int(), first)
    return PromptTiles(tiles, of, count, own_keys(tiles, of), HostTiles(table, slot, start, keys, short_rows))


def _short_rows(table: Tensor, start: Tensor, budget: KeyBudget) -> int:
    """`HostTiles.short_rows`."""
    start, table = start[start + 1 < budget.dense_below], table[start + 1 < budget.dense_below]
    left_out = budget._replace(dense_below=0).keys(start, start + 1) < start
    return int((table >= 0).sum()) if bool(left_out.any()) else 0


def _from_runs(rows: Rows, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers [L, tokens], slots of these rows and the start of each tile, from the host's description."""
    tables, slots, starts = ([torch.zeros(0, tokens, dtype=torch.int64)] for _ in range(3))
    before = 0
    for run in rows.runs or ():
        first = run.first or 0
        if run.rows:
            number = torch.arange(first // tokens, (first + run.rows - 1) // tokens + 1)
            slots.append(number[:, None] * tokens + torch.arange(tokens))
            row = slots[-1] - first
            tables.append(torch.where((row >= 0) & (row < run.rows), row + before, -1))
            starts.append(slots[-1][:, :1].expand(-1, tokens))
        before += run.rows
    return torch.cat(tables), torch.cat(slots), torch.cat(starts)[:, 0]


def _from_positions(rows: Rows, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same of rows in any order. Reads their positions, which waits for the device."""
    seq, pos = rows.seq.cpu().long(), rows.pos.cpu().long()
    number = pos // tokens
    per = int(number.max()) + 1 if number.numel() else 1
    key, of = (seq * per + number).unique(return_inverse=True)
    table = torch.full((len(key), tokens), -1, dtype=torch.int64)
    table[of, pos % tokens] = torch.arange(len(pos))
    start = key % per * tokens
    return table, start[:, None] + torch.arange(tokens), start


def _on_device(device: torch.device, *given: Tensor) -> list[Tensor]:
    """Copies in one transfer from pinned memory, so that the host waits for nothing on the device."""
    if device.type != "cuda":
        return [x.to(device) for x in given]
    flat = torch.cat([x.flatten() for x in given])
    parts = flat.pin_memory().to(device, non_blocking=True).split([x.numel() for x in given])
    return [part.view(x.shape) for part, x in zip(parts, given, strict=True)]


def scored_rows(call: LayerCall, tiles: PromptTiles, every: int, keys_every: int = 1) -> Scored:
    """Every `every`-th of a tile's rows, its first row included. Rows of tiles that choose nothing are left out.

    keys_every: n, where the lse is estimated from each n-th key.
    """
    table, slot, start, keys, _ = tiles.host
    rank = (table >= 0).long().cumsum(1) - 1
    taken = (table >= 0) & (rank % every == 0) & (keys > 0)[:, None]
    count, heads = taken.sum(1), call.kv.heads
    between = (start[:, None] - LAST - FIRST).clamp(min=0)
    lse_keys = int(((slot + 1 - between - between // -keys_every) * taken).sum()) * heads
    keys_before = int((count * start).sum()) * heads
    some = torch.zeros(call.rows.pos.shape[0], dtype=torch.int64)
    some[table[taken]] = 1
    wide = -(-table.shape[1] // every)
    order = (~taken).to(torch.int8).argsort(dim=1, stable=True)[:, :wide]  # taken rows stand first
    left = table.where(taken, -1).gather(1, order)
    left, some = _on_device(call.rows.pos.device, left, some)
    seen = (call.rows.pos.long() + 1) * some
    before = tiles.tiles.start[tiles.of] * some
    return Scored(
        RowTiles(left.int(), tiles.tiles.start),
        Spans((Span(absolute(0), absolute(seen[:, None])),)),
        lse_keys,
        Spans((Span(absolute(0), absolute(before[:, None])),)),
        keys_before,
    )


def choose_for_tiles(
    budget: KeyBudget, call: LayerCall, tiles: PromptTiles, scored: Scored, lse: Tensor | None, keys_every: int = 1
) -> TileLists:
    """The keys before each tile that its rows attend to. lse: fp32 [R, H] of dense attention, if the layer has it.

    keys_every: as `scored_rows` has it.
    """
    heads = 1 if budget.shared else call.kv.heads
    offsets = torch.nn.functional.pad(tiles.count[:, None].expand(-1, heads).flatten().cumsum(0), (1, 0))
    index = torch.empty(heads * int(tiles.host.keys.sum()), dtype=torch.int32, device=call.rows.pos.device)
    if lse is None:
        lse = call.op("tile_log_sums", scored.tiles, every=keys_every)
        call.count_read(Read.of(call.kv, scored.visible, values=False, counted=scored.lse_keys))
    call.count_read(Read.of(call.kv, scored.before, values=False, counted=scored.keys_before))
    for some in _groups(call, tiles, heads, scratch_for(lse)):
        _choose(budget, call, tiles, scored.tiles, some, offsets, lse, index)
    lists = PackedLists(index, offsets, heads, row_to_list=tiles.of, all_visible=True)
    return TileLists(lists, tiles.own, tiles.tiles)


def _choose(
    budget: KeyBudget, call: LayerCall, tiles: PromptTiles, scored: RowTiles, some: slice, offsets: Tensor,
    lse: Tensor, index: Tensor,
) -> None:  # fmt: skip
    """Choose for some tiles, and write their lists to their places in `index`."""
    heads = 1 if budget.shared else call.kv.heads
    length, count = tiles.tiles.start[some], tiles.count[some]
    columns = -(-int(tiles.host.start[some].max()) // COLUMNS) * COLUMNS
    scores = budget.over_heads(call, call.op("tile_scores", scored.take(some), lse, columns=columns).float())
    best, used = call.op(
        "top_k", scores, count[:, None].expand(-1, heads), length, first=budget.sinks, last=budget.recent - 1,
        capacity=int(tiles.host.keys[some].max()),
    )  # fmt: skip
    call.op("pack_lists", best, used, offsets[some.start * heads : some.stop * heads + 1], index)


def scratch_for(lse: Tensor) -> int:
    """Bytes that scoring some tiles may take while the lse is held."""
    return max(0, SCRATCH - lse.numel() * lse.element_size())


def groups_of(tiles: HostTiles, heads: int, kv_heads: int, scratch: int) -> list[slice]:
    """Neighbouring tiles that are scored together: as many as fit `scratch` bytes, but at least one.

    Tiles that choose nothing are left out where no tile of a group chooses. heads: lists of a tile.
    """
    found, begin, largest = list[slice](), -1, 0  # begin: of the open group, -1 between groups
    each = bytes_of_tile(tiles.start, tiles.keys, heads, kv_heads).tolist()
    for tile, (size, keys) in enumerate(zip(each, tiles.keys.tolist(), strict=True)):
        if begin >= 0 and max(largest, size) * (tile + 1 - begin) > scratch:  # as many columns as the largest
            found.append(slice(begin, tile))
            begin = -1
        if begin >= 0:
            largest = max(largest, size)
        elif keys > 0:
            begin, largest = tile, size
    return found if begin < 0 else [*found, slice(begin, len(each))]


def _groups(call: LayerCall, tiles: PromptTiles, heads: int, scratch: int) -> list[slice]:
    """`groups_of`, once for the anchors of a pass."""

    def make() -> tuple[PromptTiles, list[slice]]:
        return tiles, groups_of(tiles.host, heads, call.kv.heads, scratch)

    return call.once(("groups", id(tiles), heads, scratch), make)[1]  # an id is unique while its object lives


def bytes_of_tile(length: Tensor, keys: Tensor, heads: int, kv_heads: int) -> Tensor:
    """int64 [L]: memory that scoring a tile with `length` keys before it takes, its final list aside.

    Scores of all KV heads, and their sums if one list serves all; top-k's candidates (8 bytes for each power of two
    from an eighth of the columns on) and bits; a list of the common capacity.
    """
    columns = -(-length // COLUMNS) * COLUMNS
    scores = 4 * columns * (kv_heads + (heads if heads != kv_heads else 0))
    return scores + heads * (2 * columns + columns // 2 + 4 * keys + 1024)
