"""Random lists with factors, and the variance by its definition: fp64, one key at a time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.ops import KVView, Lists, Partial, Rows, Span, Spans, absolute, attend, merge, relative
from longreach.testing.inputs import random_kv, random_rows

IMPLS = ("reference", "numba")


class Case(NamedTuple):
    rows: Rows
    kv: KVView
    lists: Lists
    factor: Tensor
    whole: Partial
    logits: dict[str, Any]

    @property
    def given(self) -> tuple[Rows, KVView, Lists, Tensor, Partial]:
        return self.rows, self.kv, self.lists, self.factor, self.whole


def case(
    lengths: list[int], *, count: int = 5, group: int = 2, heads: int = 2, dim: int = 16, page: int | None = None,
    per: Any = "kv", room: int = 40, weighted: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0,
    softcap: float | None = None, most: int | None = None, shared: bool = False, **memory: Any,
) -> Case:  # fmt: skip
    """Rows at the ends of their sequences, with lists of keys before them. Some are empty and some overflow.

    shared: rows and heads find their lists through row_to_list and head_map. Entries past a count are poison.
    """
    draw = torch.Generator().manual_seed(seed)
    kv = random_kv(lengths, heads=heads, dim=dim, page=page, dtype=dtype, seed=seed, **memory)
    rows = random_rows(kv, count, group=group, seed=seed)
    rows = Rows(rows.q, rows.seq, kv.seq_lens[rows.seq.long()].to(rows.pos.dtype) - 1)
    axis = heads if per == "kv" else heads * group
    made = 3 if shared else axis
    room = min(room, min(lengths))
    index = torch.full((count, made, room), 10**6, dtype=torch.int32)
    used = torch.randint(0, room + 2, (count, made), generator=draw, dtype=torch.int32)
    used[0, 0], used[-1, -1] = 0, room + 1
    reach = kv.seq_lens[rows.seq.long()]
    turn = torch.randperm(count, generator=draw) if shared else torch.arange(count)
    for r in range(count):
        n = int(reach[turn.tolist().index(r)])
        for h in range(made):
            m = int(used[r, h])
            m = m if m <= room else 0
            index[r, h, :m] = torch.randperm(n, generator=draw)[:m].sort().values.int()
    spare = (torch.arange(room) >= used[..., None]) | (used > room)[..., None]
    weight = torch.rand(index.shape, generator=draw).mul(3).masked_fill(spare, torch.nan) if weighted else None
    factor = torch.rand(index.shape, generator=draw).masked_fill(spare, torch.nan)
    lists = Lists(
        index, used, weight, per, row_to_list=turn if shared else None,
        head_map=torch.randint(0, made, (axis,), generator=draw) if shared else None,
    )  # fmt: skip
    logits = {"scale": dim**-0.5, "softcap": softcap}
    always = Spans((Span(absolute(0), absolute(2)), Span(relative(0), relative(1))))
    whole = merge(*(attend(rows, kv, x, impl="reference", **logits) for x in (always, lists)))
    return Case(rows, kv, lists, factor, whole, logits)


def brute(case: Case) -> Tensor:
    """fp64 [R, H]."""
    rows, kv, lists, factor, whole, logits = case
    heads, found = rows.q.shape[1], torch.zeros(rows.q.shape[:2], dtype=torch.float64)
    for r, b in enumerate(rows.seq.tolist()):
        for h in range(heads):
            g = h // (heads // kv.heads)
            head = h if lists.per == "query" else g
            head = int(lists.head_map[head]) if lists.head_map is not None else min(head, lists.index.shape[1] - 1)
            at = r if lists.row_to_list is None else int(lists.row_to_list[r])
            n = int(lists.count[at, head])
            for i in range(n if n <= lists.index.shape[2] else 0):
                slot = int(lists.index[at, head, i])
                if slot >= int(kv.seq_lens[b]) or slot > int(rows.pos[r]):
                    continue
                page = b if kv.block_table is None else int(kv.block_table[b, slot // kv.page])
                k, v = (x[page, g, slot % kv.page].double() for x in (kv.k, kv.v))
                x = float(rows.q[r, h].double() @ k) * logits["scale"]
                cap = logits["softcap"]
                x = x if cap is None else cap * math.tanh(x / cap)
                x += 0.0 if lists.log_weight is None else float(lists.log_weight[at, head, i])
                weight = math.exp(x - float(whole.lse[r, h]))
                distance = float((v - whole.out[r, h].double()).square().sum())
                found[r, h] += float(factor[at, head, i]) * weight**2 * distance
    return found
