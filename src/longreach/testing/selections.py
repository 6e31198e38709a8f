"""Random valid Selections for given rows and view, poison in whatever is not in use."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from longreach.ops import Bound, KVView, Lists, PackedLists, Rows, RowTiles, Selection, Span, Spans, TileLists
from longreach.ops.selection import Per

Kind = Literal["spans", "lists", "packed"]


def random_selection(kind: Kind, rows: Rows, kv: KVView, *, per: Per = "kv", seed: int = 0) -> Selection:
    """Any selection of a kind: head axis, block size, log-weights, shared lists and overflows left to chance."""
    dice = random.Random(seed)
    one = dice.random() < 0.3
    if kind == "spans":
        return random_spans(rows, kv, per=per, one=one, spans=dice.choice((0, 1, 2, 2, 3)), seed=seed)
    lists = random_lists(
        rows,
        kv,
        per=per,
        one=one,
        block=dice.choice((1, 1, 2, 5, 16)),
        weighted=dice.random() < 0.5,
        shared=dice.random() < 0.3,
        overflow=0.15 if kind == "lists" else 0.0,
        mapped=dice.choice((None, None, 1, 2, 5)),
        seed=seed,
    )
    return lists if kind == "lists" else packed(lists)


def random_spans(rows: Rows, kv: KVView, *, per: Per = "kv", one: bool = False, spans: int = 2, seed: int = 0) -> Spans:
    """Spans that may be empty, overlap and reach past what is filled; bounds int or tensor, absolute or relative."""
    dice = random.Random(seed)
    top = int(kv.seq_lens.max()) + 3 if kv.sequences else 3
    shape = (rows.pos.shape[0], _heads(rows, kv, per, one))

    def bound(low: int, high: int) -> Bound:
        relative = dice.random() < 0.5
        shift = top if relative else 0

        def value() -> int:
            return dice.randint(low, high) - shift

        if dice.random() < 0.4:
            return Bound(value(), relative)
        table = [[value() for _ in range(shape[1])] for _ in range(shape[0])]
        return Bound(torch.tensor(table, dtype=rows.pos.dtype, device=rows.pos.device).view(shape), relative)

    return Spans(tuple(Span(bound(0, top), bound(top // 3, top + 2)) for _ in range(spans)), per)


def random_lists(
    rows: Rows,
    kv: KVView,
    *,
    per: Per = "kv",
    one: bool = False,
    block: int = 1,
    weighted: bool = False,
    shared: bool = False,
    overflow: float = 0.0,
    mapped: int | None = None,
    seed: int = 0,
) -> Lists:
    """Distinct entries in no order, every third list empty; shared: one list a sequence, else one a row.

    one: a head axis of 1. mapped: a head axis of this many entries, any of which may serve a head.
    overflow: share of the lists whose count exceeds the capacity; their entries are poison.
    """
    dice = random.Random(seed)
    filled = kv.seq_lens.tolist()
    of = list(range(kv.sequences)) if shared else rows.seq.tolist()
    served = _heads(rows, kv, per, False)
    heads = mapped or _heads(rows, kv, per, one)
    most = max((-(-n // block) for n in filled), default=0)
    capacity = dice.randint(1, most + 2)
    index, count, weight = [], [], []
    for seq in of:
        for _ in range(heads):
            held = -(-filled[seq] // block)
            used = 0 if dice.random() < 0.33 else dice.randint(0, min(held, capacity))
            over = dice.random() < overflow
            entries = [] if over else dice.sample(range(held), used)
            spare = capacity - len(entries)
            index.append(entries + [dice.choice((-1, 0, 10**9)) for _ in range(spare)])
            count.append(capacity + dice.randint(1, 9) if over else used)
            weight.append([dice.uniform(-3, 3) for _ in entries] + [torch.nan] * spare)
    shape = (len(of), heads, capacity)
    ints, device = rows.pos.dtype, rows.pos.device
    return Lists(
        torch.tensor(index, dtype=ints, device=device).view(shape),
        torch.tensor(count, dtype=ints, device=device).view(shape[:2]),
        torch.tensor(weight, dtype=torch.float32, device=device).view(shape) if weighted else None,
        per,
        block,
        rows.seq if shared else None,
        torch.tensor([dice.randrange(heads) for _ in range(served)], dtype=ints, device=device) if mapped else None,
    )


def prompt_tiles(
    kv: KVView, group: int, tokens: int, *, mapped: int | None = None, one: bool = False, shuffled: bool = False,
    seed: int = 0,
) -> tuple[Rows, TileLists]:  # fmt: skip
    """The last rows of each sequence, in tiles of `tokens` positions, with random distinct keys before each tile.

    A tile may lack its first rows (a chunk that begins within it) and its last ones. Rows lie in the order of
    positions, or in no order. mapped: a head axis of this many entries; one: a head axis of 1.
    """
    dice, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    tables: list[list[int]] = []
    starts, seqs, positions = list[int](), list[int](), list[int]()
    for seq, length in enumerate(kv.seq_lens.tolist()):
        first = dice.randint(0, max(0, length - 1))
        for start in range(first // tokens * tokens, length, tokens):
            mine = range(max(first, start), min(start + tokens, length))
            tables.append([-1] * (mine[0] - start) + [len(positions) + n for n in range(len(mine))])
            tables[-1] += [-1] * (tokens - len(tables[-1]))
            starts.append(start)
            seqs += [seq] * len(mine)
            positions += mine
    count, device, ints = len(positions), kv.seq_lens.device, kv.seq_lens.dtype
    order = torch.randperm(count, generator=draw) if shuffled else torch.arange(count)
    table = torch.tensor(tables, dtype=torch.int64).view(len(tables), tokens)
    place = order.argsort()
    table = torch.where(table >= 0, place[table.clamp(min=0)] if count else table, -1)
    tile = torch.zeros(count, dtype=torch.int64)
    tile[table[table >= 0]] = (table >= 0).nonzero()[:, 0]
    q = torch.randn(count, kv.heads * group, kv.k.shape[3], generator=draw, dtype=torch.float64).to(device, kv.k.dtype)
    of_rows, at = (torch.tensor(x, dtype=ints)[order].to(device) for x in (seqs, positions))
    rows = Rows(q, of_rows, at)
    heads = mapped or (1 if one else kv.heads)
    index = [sorted(dice.sample(range(s), dice.choice((0, s, s // 2, s // 5)))) for s in starts for _ in range(heads)]
    offsets = torch.tensor([len(x) for x in [[], *index]]).cumsum(0)
    head_map = torch.tensor([dice.randrange(heads) for _ in range(kv.heads)], device=device) if mapped else None
    lists = PackedLists(
        torch.tensor([n for x in index for n in x], dtype=torch.int32, device=device), offsets.to(device), heads,
        row_to_list=tile.to(device), head_map=head_map, all_visible=True,
    )  # fmt: skip
    return rows, TileLists.of(lists, RowTiles(table.int().to(device), torch.tensor(starts, device=device)))


def packed(lists: Lists) -> PackedLists:
    """The same lists, none of which may overflow, behind one another."""
    count = lists.count.flatten().tolist()

    def join(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return torch.cat([flat[n, :c] for n, c in enumerate(count)] or [flat.new_zeros(0)])

    offsets = [sum(count[:n]) for n in range(len(count) + 1)]
    return PackedLists(
        join(lists.index),
        torch.tensor(offsets, dtype=lists.count.dtype, device=lists.count.device),
        lists.index.shape[1],
        None if lists.log_weight is None else join(lists.log_weight),
        lists.per,
        lists.block,
        lists.row_to_list,
        lists.head_map,
        lists.all_visible,
    )


def requiring_grad(lists: Lists) -> Lists:
    """The lists with fp64 log-weights, 0 where they are not in use, that ask for a gradient."""
    if lists.log_weight is None:
        raise ValueError("expected lists with log-weights")
    return replace(lists, log_weight=lists.log_weight.nan_to_num(0.0).double().requires_grad_())


def _heads(rows: Rows, kv: KVView, per: Per, one: bool) -> int:
    if one:
        return 1
    return kv.heads if per == "kv" else rows.q.shape[1]
