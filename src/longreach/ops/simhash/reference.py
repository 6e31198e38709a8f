"""simhash in plain PyTorch, to be read beside the paper: one row, head and segment at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from longreach.ops.selection import Per
from longreach.ops.simhash import sealing
from longreach.ops.simhash.api import Collisions
from longreach.ops.simhash.attention import NUMBERS, look_up_bytes
from longreach.ops.simhash.probability import TINY, inclusion
from longreach.ops.simhash.tables import HashTables
from longreach.ops.types import KVView, Partial, Rows, accumulator


def codes(x: Tensor, projections: Tensor, centre: Tensor | None) -> Tensor:
    wide = accumulator(x.dtype)
    x = x.to(wide) if centre is None else x.to(wide) - centre.to(wide)
    x = torch.where(_void(x)[..., None], 0, x)
    tables, bits, _ = projections.shape
    signs = (x @ projections.to(wide).flatten(0, 1).T).unflatten(-1, (tables, bits)) > 0
    return (signs.int() << torch.arange(bits, dtype=torch.int32, device=x.device)).sum(-1).to(torch.uint16)


def build(tables: HashTables, codes: Tensor, seq: Tensor, count: Tensor) -> None:
    size, buckets = tables.size, 1 << tables.bits
    for s, b in enumerate(seq.tolist()):
        start = max(int(tables.stop[b]), tables.first)
        stop = start + int(count[s])
        new = codes[s, : stop - start].long().permute(1, 2, 0)  # [G, tables, T]
        for segment in range(start // size, -(-stop // size) if stop > start else 0):
            begin, end = segment * size, min((segment + 1) * size, stop)
            here, old = torch.arange(max(start, begin), end, device=seq.device), None
            code = new[:, :, max(start, begin) - start : end - start]
            if max(begin, tables.first) < start:  # the segment holds keys already, some perhaps past a truncation
                old = _bucketed(tables, b, segment)
            offsets, ids = _sorted(code, here - begin, old, max(start - begin, 0), buckets)
            tables.stop[b] = max(begin, tables.first)  # an interrupt between the writes empties the segment
            tables.offsets[b, :, :, segment] = offsets.to(tables.offsets.dtype)
            tables.ids[b, :, :, begin : begin + ids.shape[2]] = ids.to(torch.uint16)
        tables.stop[b] = stop


def _bucketed(tables: HashTables, b: int, segment: int) -> tuple[Tensor, Tensor]:
    """Codes and ids of a segment's entries, in the tables' order: two int64 [G, tables, entries]."""
    offsets = tables.offsets[b, :, :, segment].long()
    entries = int(offsets[0, 0, -1])
    ids = tables.ids[b, :, :, segment * tables.size :][:, :, :entries].long()
    column = torch.arange(entries, device=ids.device).expand_as(ids).contiguous()
    return torch.searchsorted(offsets, column, right=True) - 1, ids


def _sorted(
    code: Tensor, here: Tensor, old: tuple[Tensor, Tensor] | None, limit: int, buckets: int
) -> tuple[Tensor, Tensor]:
    """Offsets and ids of keys with these codes, and of old entries with ids below `limit`."""
    ids = here.expand_as(code)
    if old is not None:
        keep = (old[1] < limit).flatten(0, 1).nonzero(as_tuple=True)  # as many in each table
        kept = [x.flatten(0, 1)[keep].view(*code.shape[:2], -1) for x in old]
        code, ids = torch.cat([kept[0], code], 2), torch.cat([kept[1], ids], 2)
    order = (code << 16 | ids).sort(-1).indices
    edges = torch.arange(buckets + 1, device=code.device).expand(*code.shape[:2], -1).contiguous()
    return torch.searchsorted(code.gather(2, order), edges), ids.gather(2, order)


def seal(
    kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor, stop: Tensor, *, centred: int,
    block: int,
) -> Tensor:  # fmt: skip
    return sealing.seal(codes, build, kv, slots, tables, projections, centre, stop, centred)


def collide(
    rows: Rows, tables: HashTables, codes: Tensor, *, capacity: int, least: int, per: Per
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, heads = rows.q.shape[:2]
    group = heads // tables.heads
    lists, each = (tables.heads, group) if per == "kv" else (heads, 1)
    index = torch.zeros(count, lists, capacity, dtype=torch.int32, device=codes.device)
    met = torch.zeros_like(index, dtype=torch.uint8)
    used, looked_up = (torch.zeros(count, lists, dtype=torch.int32, device=codes.device) for _ in range(2))
    for r, b in enumerate(rows.seq.tolist()):
        stop = int(tables.stop[b])
        for item in range(lists):
            hits = torch.zeros(max(stop, 0), dtype=torch.uint8, device=codes.device)
            for head in range(item * each, (item + 1) * each):
                times, read = _collisions(tables, b, head // group, codes[r, head].long(), stop)
                hits += times >= least
                looked_up[r, item] += read
            keys = hits.nonzero()[:, 0]
            used[r, item] = len(keys)
            some = keys[:capacity]
            index[r, item, : len(some)] = some.int()
            met[r, item, : len(some)] = hits[some]
    return index, used, met, looked_up


def _collisions(tables: HashTables, b: int, g: int, code: Tensor, stop: int) -> tuple[Tensor, int]:
    """In how many tables each position below `stop` shares the bucket of a query: int64 [stop]; and the ids read."""
    lowest = tables.first // tables.size * tables.size
    found, read = [torch.zeros(min(lowest, max(stop, 0)), dtype=torch.int64, device=code.device)], 0
    for begin in range(lowest, stop if stop > tables.first else 0, tables.size):
        offsets = tables.offsets[b, g, :, begin // tables.size].long()
        begins, ends = (offsets.gather(1, code[:, None] + i)[:, 0].tolist() for i in (0, 1))
        ids = tables.ids[b, g, :, begin:]
        met = torch.cat([ids[table, i:j] for table, (i, j) in enumerate(zip(begins, ends, strict=True))]).long()
        read += len(met)
        found.append(torch.bincount(met, minlength=tables.size)[: min(tables.size, stop - begin)])
    times = torch.cat(found)
    return torch.nn.functional.pad(times, (0, max(stop, 0) - len(times))), read


def weigh(
    rows: Rows, kv: KVView, tables: HashTables, found: Collisions, centre: Tensor, *, floor: float
) -> tuple[Tensor, Tensor]:
    found.lists().check_entries(rows, kv)
    heads, group = rows.q.shape[1], kv.group(rows)
    lists, each = (kv.heads, group) if found.per == "kv" else (heads, 1)
    used = (found.count <= found.index.shape[2])[..., None]
    used = used & (torch.arange(found.index.shape[2], device=kv.k.device) < found.count[..., None])
    weight, factor = torch.zeros(2, *found.index.shape, device=kv.k.device)
    wide = accumulator(kv.k.dtype)
    for r, b in enumerate(rows.seq.tolist()):
        for item in range(lists):
            g = item * each // group
            slot = found.index[r, item, used[r, item]].long()
            page, offset = kv.locate(torch.full_like(slot, b), slot)
            k = kv.k[page, g, offset].to(wide) - centre[b, g].to(wide)
            q = rows.q[r, item * each : (item + 1) * each].to(wide)
            p = torch.acos(-cosine(q, k)) / math.pi  # 1 - acos(c) / pi, without the difference
            u = inclusion(p, tables.bits, tables.tables, found.least).clamp(min=max(floor, TINY))
            met = found.met[r, item, used[r, item]]
            weight[r, item, used[r, item]] = (met.to(wide).log() - u.sum(0).log()).float()
            factor[r, item, used[r, item]] = ((u * (1 - u)).sum(0) / u.sum(0)).float()
    return weight, factor


def attend_sampled(
    rows: Rows, kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor, limit: Tensor, *,
    least: int, own: bool, sinks: int, floor: float, scale: float, softcap: float | None,
) -> tuple[Partial, tuple[Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
    """Row by row: each query head's logits over the visible keys that it does not leave out."""
    held, group, device = slots.long()[rows.seq.long()], kv.group(rows), kv.k.device
    per: Per = "query" if own else "kv"
    each, room = group if own else 1, max(1, int(limit.max())) if len(limit) else 1
    index, count, met, looked_up = collide(
        replace(rows, seq=held), tables, codes(rows.q, projections, None), capacity=max(1, tables.ids.shape[3]),
        least=least, per=per,
    )  # fmt: skip
    over = count > limit[:, None]
    listed = index[..., :room].contiguous(), torch.where(over, room + 1, count)
    found = Collisions(*listed, per, met[..., :room].contiguous(), looked_up, least)
    weights, _ = weigh(rows, kv, tables, found, centre[slots.long()], floor=floor)
    wide = accumulator(kv.k.dtype)
    out, lse = rows.q.new_zeros(rows.q.shape, dtype=wide), rows.q.new_zeros(rows.q.shape[:2], dtype=wide)
    numbers = torch.zeros(len(rows.pos), kv.heads, len(NUMBERS), dtype=torch.int64, device=device)
    for r, b in enumerate(rows.seq.tolist()):
        reach, end = min(int(rows.pos[r]) + 1, int(kv.seq_lens[b])), int(tables.stop[held[r]])
        slot, first, stop = torch.arange(reach, device=device), min(sinks, reach), min(end, reach)
        page, offset = kv.locate(torch.full_like(slot, b), slot)
        for g in range(kv.heads):
            k, v = (x[page, g, offset].to(wide) for x in (kv.k, kv.v))
            for h in range(g * group, (g + 1) * group):
                mine = h if own else g
                added = torch.zeros(reach, dtype=wide, device=device)
                if not over[r, mine]:
                    n = int(count[r, mine])
                    added[first:stop] = -torch.inf
                    added[index[r, mine, :n].long()] = weights[r, mine, :n].to(wide)
                read = added > -torch.inf
                logits = (k[read] @ rows.q[r, h].to(wide)) * scale
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                logits = logits + added[read]
                lse[r, h] = logits.logsumexp(0)
                out[r, h] = torch.softmax(logits, 0) @ v[read]
            its = range(g * each, (g + 1) * each)
            full = sum(bool(over[r, i]) for i in its)
            union = len(torch.cat([index[r, i, : count[r, i]] for i in its]).unique())
            segments = -(-end // tables.size) - tables.first // tables.size if end > tables.first else 0
            numbers[r, g] = torch.tensor([
                union, sum(int(met[r, i, : count[r, i]].sum()) for i in its if not over[r, i]), full,
                0 if full == each else union, reach if full else union + first + reach - max(stop, first),
                2 * int(looked_up[r, its.start : its.stop].sum()) + segments * look_up_bytes(group, tables), end,
            ])  # fmt: skip
    return Partial(out, lse), (*listed, weights), numbers


def cosine(q: Tensor, k: Tensor) -> Tensor:
    """Cosines of vectors [n, D] and [m, D]: [n, m], in [-1, 1]. Void ones have 1 with each other and 0 with others."""
    void_q, void_k = _void(q), _void(k)
    q, k = (torch.where(_void(x)[:, None], 0, x / x.square().sum(-1, keepdim=True).sqrt()) for x in (q, k))
    return torch.where(void_q[:, None] & void_k, 1, (q @ k.T).clamp(-1, 1))


def _void(x: Tensor) -> Tensor:
    """Vectors [..., D] without a usable direction: bool [...]."""
    square = x.float().square().sum(-1)
    return ~((square > 0) & (square < math.inf))
