"""What attend and pooled_scores ought to give, in fp64 and plain loops. Shares no code with any implementation.

`seen_keys` lists the keys visible to a row, slot by slot; the rest is the textbook formula over them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.ops import KVView, Lists, PackedLists, Rows, Selection, Spans, TileLists

Keys = dict[int, float]  # slot -> log-weight


@dataclass(frozen=True)
class Exact:
    """The result in fp64 with the magnitudes an error bound is made of (tolerance.py); 0 where no key is seen.

    out [R, H, D], lse [R, H]; keys: how many [R, H]; products: the largest sum_i |scale q_i k_i| of a key [R, H];
    logit: the largest |logit|, of cap, log-weight and sink too [R, H]; mass: sum softmax |v| [R, H, D];
    sunk: whether there was a sink.
    """

    out: Tensor
    lse: Tensor
    keys: Tensor
    products: Tensor
    logit: Tensor
    mass: Tensor
    sunk: bool


def seen_keys(rows: Rows, kv: KVView, selection: Selection) -> list[list[Keys]]:
    """[R][H]: the slots that each row attends to with each query head, and their log-weights."""
    heads = rows.q.shape[1]
    group = heads // kv.heads
    names = _rule(selection)
    found = []
    for r, (seq, pos) in enumerate(zip(rows.seq.tolist(), rows.pos.tolist(), strict=True)):
        positions = [_positions(kv, seq, g) for g in range(kv.heads)]
        row = []
        for h in range(heads):
            axis = h if selection.per == "query" else h // group
            keys: Keys = {}
            for slot, position in enumerate(positions[h // group]):
                weight = names(r, axis, slot, position - pos)
                if position <= pos and weight is not None:
                    keys[slot] = weight
            row.append(keys)
        found.append(row)
    return found


def exact_attend(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
) -> Exact:
    """attend, from its definition."""
    count, heads, dim = rows.q.shape
    group = heads // kv.heads
    out, mass = torch.zeros(2, count, heads, dim, dtype=torch.float64)
    products, logit = torch.zeros(2, count, heads, dtype=torch.float64)
    lse = torch.full((count, heads), -torch.inf, dtype=torch.float64)
    keys = torch.zeros(count, heads, dtype=torch.int64)
    held = {seq: _stored(kv, seq) for seq in set(rows.seq.tolist())}
    for r, row in enumerate(seen_keys(rows, kv, selection)):
        for h, seen in enumerate(row):
            k, v = (x[list(seen), h // group] for x in held[int(rows.seq[r])])
            terms = k * rows.q[r, h].double() * scale
            x = y = terms.sum(-1)
            if softcap is not None:
                y = softcap * torch.tanh(x / softcap)
            weight = torch.tensor(list(seen.values()), dtype=torch.float64)
            z = y + weight
            v = torch.cat([v, torch.zeros(1, dim, dtype=torch.float64)])
            sink = -torch.inf if sink_logit is None else float(sink_logit[h])
            z = torch.cat([z, torch.tensor([sink], dtype=torch.float64)])
            if torch.isneginf(z).all():
                continue
            lse[r, h] = torch.logsumexp(z, 0)
            share = torch.exp(z - lse[r, h])
            out[r, h], mass[r, h] = share @ v, share @ v.abs()
            keys[r, h] = len(seen)
            products[r, h] = max(terms.abs().sum(-1).tolist(), default=0.0)
            finite = torch.cat([x, y, weight, z])
            logit[r, h] = finite[finite.isfinite()].abs().max()
    return Exact(out, lse, keys, products, logit, mass, sink_logit is not None)


def exact_logits(rows: Rows, kv: KVView, *, scale: float, softcap: float | None = None) -> Tensor:
    """The logits of all that rows see: fp64 [R, G, N, group], -inf at slots that a row does not see."""
    count, heads, _ = rows.q.shape
    group = heads // kv.heads
    found = torch.full((count, kv.heads, kv.capacity, group), -torch.inf, dtype=torch.float64)
    for r, row in enumerate(seen_keys(rows, kv, Spans.dense())):
        k, _ = _stored(kv, int(rows.seq[r]))
        for h, seen in enumerate(row):
            x = k[list(seen), h // group] @ rows.q[r, h].double() * scale
            found[r, h // group, list(seen), h % group] = x if softcap is None else softcap * torch.tanh(x / softcap)
    return found


def exact_pooled_scores(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None = None,
    lse: Tensor | None = None,
    tile: Tensor | None = None,
    tiles: int | None = None,
) -> Tensor:
    """pooled_scores, from its definition: fp64 [tiles, G, N]."""
    count, heads, _ = rows.q.shape
    group = heads // kv.heads
    tile = torch.arange(count) if tile is None else tile
    pooled = torch.zeros(count if tiles is None else tiles, kv.heads, kv.capacity, dtype=torch.float64)
    for r, row in enumerate(seen_keys(rows, kv, Spans.dense())):
        k, _ = _stored(kv, int(rows.seq[r]))
        for h, seen in enumerate(row):
            slots = list(seen)
            x = k[slots, h // group] @ rows.q[r, h].double() * scale
            x = x if softcap is None else softcap * torch.tanh(x / softcap)
            total = torch.logsumexp(x, 0) if lse is None else lse[r, h].double()
            pooled[tile[r], h // group, slots] += torch.exp(x - total)
    return pooled


def _place(kv: KVView, seq: int, slot: int) -> tuple[int, int]:
    page, offset = divmod(slot, kv.k.shape[2])
    return (seq if kv.block_table is None else int(kv.block_table[seq, page])), offset


def _positions(kv: KVView, seq: int, head: int) -> list[int]:
    """Position of each filled slot."""
    slots = range(int(kv.seq_lens[seq]))
    if kv.slot_pos is None:
        return list(slots)
    return [int(kv.slot_pos[page, head, offset]) for page, offset in (_place(kv, seq, n) for n in slots)]


def _stored(kv: KVView, seq: int) -> tuple[Tensor, Tensor]:
    """K and V of the filled slots, fp64 [N, G, D]."""
    places = [_place(kv, seq, n) for n in range(int(kv.seq_lens[seq]))]
    page, offset = torch.tensor(places, dtype=torch.int64).view(-1, 2).to(kv.k.device).unbind(1)
    return kv.k[page, :, offset].double(), kv.v[page, :, offset].double()


def _rule(selection: Selection) -> Callable[[int, int, int, int], float | None]:
    """(row, head of the selection's axis, slot, position minus the row's) -> log-weight, None if not selected."""
    if isinstance(selection, Spans):
        return _spans_rule(selection)
    if isinstance(selection, TileLists):
        listed_keys, own_keys = _rule(selection.lists), _rule(selection.own)

        def either(*given: int) -> float | None:
            found = listed_keys(*given)
            return own_keys(*given) if found is None else found

        return either
    if isinstance(selection, Lists):
        index, count = selection.index.tolist(), selection.count.tolist()
        weight = None if selection.log_weight is None else selection.log_weight.tolist()

        def entries(n: int, h: int) -> Keys | None:
            if count[n][h] > len(index[n][h]):
                return None
            used = range(count[n][h])
            return {index[n][h][c]: 0.0 if weight is None else weight[n][h][c] for c in used}

        axis = selection.index.shape[1]
    else:
        assert isinstance(selection, PackedLists)
        flat, offsets = selection.index.tolist(), selection.offsets.tolist()
        log_weight = None if selection.log_weight is None else selection.log_weight.tolist()
        axis = selection.heads

        def entries(n: int, h: int) -> Keys | None:
            used = range(offsets[n * axis + h], offsets[n * axis + h + 1])
            return {flat[e]: 0.0 if log_weight is None else log_weight[e] for e in used}

    list_of = None if selection.row_to_list is None else selection.row_to_list.tolist()
    head_of = None if selection.head_map is None else selection.head_map.tolist()
    known: dict[tuple[int, int], Keys | None] = {}

    def listed(row: int, head: int, slot: int, _: int) -> float | None:
        entry = head if head_of is None else head_of[head]
        which = (row if list_of is None else list_of[row], 0 if axis == 1 else entry)
        if which not in known:
            known[which] = entries(*which)
        found = known[which]
        return 0.0 if found is None else found.get(slot // selection.block)

    return listed


def _spans_rule(selection: Spans) -> Callable[[int, int, int, int], float | None]:
    bounds = [
        [(b.relative, b.value if isinstance(b.value, int) else b.value.tolist()) for b in span]
        for span in selection.spans
    ]

    def value(raw: int | list[list[int]], row: int, head: int) -> int:
        if isinstance(raw, int):
            return raw
        return raw[row][0 if len(raw[row]) == 1 else head]

    def spanned(row: int, head: int, slot: int, ahead: int) -> float | None:
        for (start_near, start), (stop_near, stop) in bounds:
            begun = (ahead if start_near else slot) >= value(start, row, head)
            ended = (ahead if stop_near else slot) >= value(stop, row, head)
            if begun and not ended:
                return 0.0
        return None

    return spanned
