"""Kascade's prefill: tiles of rows choose and share their keys (sections 3.4, 3.6 and 4.1).

A tile is the rows of a sequence at positions [n T, (n + 1) T), T = max(1, tile // group) tokens: cut at absolute
positions. With P = n T the tokens before it, h the query heads of KV head g and r the tile's rows:

    s[g, n] = sum_{r, h} exp(logit[r, h, n] - lse[r, h])    n < P; the lse is over all keys visible to row r
    k(P)    = min(max(floor(k P), min_keys), P)
    I[g]    = the k(P) largest of s[g, .]
    out[r]  = attention over I[g] and [P, pos(r)]

so the tile's own keys are attended to causally and do not count in k. I always holds the sinks, and the newest tokens
before the tile that `recent` covers for its first row.

At most AT_ONCE logits are held at a time, at any length. Growing with the length are one row of pooled scores per tile
and KV head, a few tiles at a time, and the packed lists: 4 bytes for each key that a tile chooses, about 0.86 GB at
128K tokens, 10% and 8 KV heads, until the next anchor's lists replace them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.methods.call import LayerCall
from longreach.methods.kascade.budget import KeyBudget
from longreach.ops import PackedLists, Rows, Span, Spans, absolute, relative

AT_ONCE = 1 << 26  # logits of rows that are scored together: 256 MiB in fp32


@dataclass(frozen=True)
class PromptTiles:
    """The tiles of the rows of a pass, by sequence and position.

    of: int64 [R], the tile of each row; order: int64 [R], the rows tile after tile; both on the device.
    rows: int64 [T], rows of each tile; start: int64 [T], the tokens before each; both on the host.
    own: the keys of a row's own tile up to the row.
    """

    of: Tensor
    order: Tensor
    rows: Tensor
    start: Tensor
    own: Spans

    def groups(self, at_once: int) -> Iterator[tuple[slice, Tensor]]:
        """Neighbouring tiles that have a past, with their rows: up to `at_once` rows together, or one tile."""
        first = since = end = 0
        for n, (count, start) in enumerate(zip(self.rows.tolist(), self.start.tolist(), strict=True)):
            if end > since and (start == 0 or end + count - since > at_once):
                yield slice(first, n), self.order[since:end]
                first, since = n, end
            end += count
            if start == 0:
                first, since = n + 1, end
        if end > since:
            yield slice(first, self.rows.shape[0]), self.order[since:end]


def tiles_of(rows: Rows, tokens: int) -> PromptTiles:
    """The tiles of `tokens` positions that hold the rows. Host work: it reads their positions."""
    seq, pos = rows.seq.cpu().long(), rows.pos.cpu().long()
    number = pos // tokens
    per = int(number.max()) + 1 if number.numel() else 1
    key, of, count = (seq * per + number).unique(return_inverse=True, return_counts=True)
    order, start, device = of.argsort(stable=True), key % per * tokens, rows.pos.device
    before = start[of][:, None]
    own = Spans((Span(absolute(before.to(device)), relative(1)),))
    return PromptTiles(of.to(device), order.to(device), count, start, own)


def choose_for_tiles(budget: KeyBudget, call: LayerCall, tiles: PromptTiles) -> PackedLists:
    """The keys before each tile that its rows attend to."""
    device, heads = call.rows.pos.device, 1 if budget.shared else call.kv.heads
    count = budget.keys(tiles.start, tiles.start + 1)
    ends = torch.cat([count.new_zeros(1), count.repeat_interleave(heads).cumsum(0)])
    index = torch.empty(int(ends[-1]), dtype=torch.int32, device=device)
    at_once = max(1, AT_ONCE // (call.rows.q.shape[1] * call.kv.capacity))
    for some, rows in tiles.groups(at_once):
        scores = budget.over_heads(call, _pooled(call, tiles.rows[some].tolist(), rows, at_once).float())
        keys, length, capacity = count[some].to(device), tiles.start[some].to(device), int(count[some].max())
        best, used = call.op(
            "top_k",
            scores,
            keys[:, None].expand(-1, heads),
            length,
            first=budget.sinks,
            last=budget.recent - 1,
            capacity=capacity,
        )
        chosen = best[torch.arange(capacity, device=device) < used[..., None]]
        index[int(ends[some.start * heads]) : int(ends[some.stop * heads])] = chosen
    return PackedLists(index, ends.to(device), heads, row_to_list=tiles.of, all_visible=True)


def _pooled(call: LayerCall, sizes: list[int], rows: Tensor, at_once: int) -> Tensor:
    """fp32 [tiles, G, N]: scores of rows, tile after tile of these sizes; past what is before a tile, anything."""
    if len(sizes) == 1 and sizes[0] > at_once:
        found = _pooled(call, [at_once], rows[:at_once], at_once)
        for part in rows[at_once:].split(at_once):
            found += _pooled(call, [part.shape[0]], part, at_once)
        return found
    mine = call.take(rows)
    lse, logits = mine.op("score_keys")
    return torch.stack([tile.sum(0) for tile in mine.op("pooled_scores", lse=lse, logits=logits).split(sizes)])
