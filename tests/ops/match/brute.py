"""match, spelled out: a row, a head, an earlier row at a time, in fp64 and plain Python. Shares no code with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longreach.ops import Rows
from longreach.ops.match import Matched, Ring, Rule
from longreach.ops.rope import RotaryAngles, angles

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass
class Noted:
    """What is remembered of a row: its queries [H, D], the depth of each head's entry, each KV head's account."""

    query: Tensor
    depth: list[int]
    credit: list[float]


@dataclass
class Brute:
    """Sequences by the ring's number, each a dictionary from positions to what is remembered."""

    rule: Rule
    heads: int
    kv_heads: int
    size: int
    seen: dict[int, dict[int, Noted]] = field(default_factory=dict)

    def nearest(self, sequence: int, pos: int, query: Tensor, head: int, limit: float) -> tuple[float, int]:
        """(squared distance, position) of the nearest candidate below the limit, (inf, -1) for none."""
        candidates = dict[int, Tensor]()
        for p in range(max(0, pos - self.rule.window), pos):  # ascending: among equals the last one stays
            row = self.seen.get(sequence, {}).get(p)
            if row is None or p + 1 - self.rule.band <= self.rule.sinks:
                continue
            if not self.rule.near <= pos - p <= self.rule.far:
                continue
            if self.rule.deepest is not None and row.depth[head] >= self.rule.deepest:
                continue
            candidates[p] = row.query[head]
        best, where = math.inf, -1
        if not candidates:
            return best, where
        q, units = query.double(), 8 if query.dtype in (torch.float32, torch.float64) else 4
        same = (units * UNIT[query.dtype]) ** 2 * float((q**2).sum())
        distances = ((q - torch.stack([*candidates.values()]).double()) ** 2).sum(-1).tolist()
        for p, distance in zip(candidates, distances, strict=True):
            if not distance < limit:
                continue
            if distance <= same < math.inf:
                distance = 0.0
            if distance <= best:
                best, where = distance, p
        return best, where

    def row(self, sequence: int, pos: int, query: Tensor) -> dict[str, Any]:
        """What comes of one row with queries [H, D] as they are matched; it is remembered."""
        rule, group = self.rule, self.heads // self.kv_heads
        history = self.seen.setdefault(sequence, {})
        before = history.get(pos - 1)
        starts, takes, depths, credits, searched, found = [], [], [], [], [], []
        for g in range(self.kv_heads):
            account = math.inf if before is None else before.credit[g]
            looked = max(0, min(rule.window, pos - rule.sinks - rule.band))
            long = pos + 1 >= rule.min_context
            if long and account >= 0 and looked:
                mine = [self.nearest(sequence, pos, query[h], h, rule.limit) for h in range(g * group, (g + 1) * group)]
                near = [p >= 0 for _, p in mine]
                every = all(near)
                searched.append(True)
            else:
                mine, near, every = [(math.inf, -1)] * group, [False] * group, False
                searched.append(False)
            found += [p if ok else None for (_, p), ok in zip(mine, near, strict=True)]
            for h, (_, p) in enumerate(mine, g * group):
                starts.append(max(rule.sinks, p + 1 - rule.band) if every else rule.sinks)
                takes.append(p if every else None)
                depths.append(history[p].depth[h] + 1 if every else 0)
            if searched[-1]:
                saved = min(starts[g * group :]) - rule.sinks if every else 0
                full = max(rule.patience, rule.reuses * (pos + 1 - rule.sinks) / (looked * rule.price))
                account = min(full, min(full, account) + saved / (looked * rule.price) - 1)
                account = -float(rule.rest) if account < 0 else account
            elif long and account < 0:
                account += 1
            credits.append(account)
        history[pos] = Noted(query, depths, credits)
        history.pop(pos - self.size, None)
        return {
            "start": starts,
            "take": takes,
            "depth": depths,
            "credit": credits,
            "searched": searched,
            "found": found,
        }


def random_rows(size: int, heads: int, dim: int, pos: Tensor, draw: torch.Generator, dtype: torch.dtype) -> Rows:
    """Rows of sequences 0, 1, ... in no order, at their positions. Queries are of three kinds, alike within each."""
    seq = torch.randperm(size, generator=draw)
    kinds = torch.randn(3, heads, dim, generator=torch.Generator().manual_seed(5))
    kind = kinds[torch.randint(0, 3, (size,), generator=draw)]
    q = 0.7 * (kind + 0.3 * torch.randn(size, heads, dim, generator=draw))
    return Rows(q.to(dtype), seq, pos[seq])


def random_turn(pos: Tensor, pairs: int, layout: Any, dtype: torch.dtype) -> RotaryAngles:
    """A rotation by position whose cos and sin are rounded as models round them, and not on a circle."""
    cos, sin = angles(pos, 100.0 ** -(torch.arange(pairs) / pairs), scaling=1.2)
    return RotaryAngles(cos.to(dtype), sin.to(dtype), layout)


def agrees(got: Matched, ring: Ring, rows: Rows, slots: Tensor, wants: list[dict[str, Any]], rule: Rule) -> None:
    """Fail unless `got`, and what now stands in the ring, is what `wants` says of each row."""
    heads, size = ring.heads, ring.size
    group = heads // ring.kv_heads
    for r, want in enumerate(wants):
        sequence, pos = int(slots[rows.seq[r]]), int(rows.pos[r])
        memory = [(sequence * heads + h) * size for h in range(heads)]
        assert got.start[r].tolist() == want["start"]
        takes = [-1 if p is None else at + p % size for at, p in zip(memory, want["take"], strict=True)]
        assert got.read_entry[r].tolist() == takes
        assert got.write_entry[r].tolist() == [at + pos % size for at in memory]
        place = pos % size
        assert int(ring.stamp[sequence, place]) == pos
        assert ring.depth[sequence, :, place].tolist() == want["depth"]
        torch.testing.assert_close(
            ring.credit[sequence, :, place].double(), torch.tensor(want["credit"], dtype=torch.float64), rtol=1e-5,
            atol=1e-5,
        )  # fmt: skip
        for g in range(ring.kv_heads):
            mine = want["start"][g * group : (g + 1) * group]
            keys = {n for n in range(pos + 1) if n < rule.sinks or n >= min(mine)}
            assert int(got.reads[r, g, 0]) == len(keys)
