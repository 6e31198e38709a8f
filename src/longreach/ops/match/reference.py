"""nearest and match in plain PyTorch, to be compared with the paper (section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.match.ring import DEEPEST, Ring
from longreach.ops.match.rule import DEPTHS, NOTES, Matched, Nearest, Rule, tie
from longreach.ops.rope import RotaryAngles
from longreach.ops.types import Rows, accumulator


def nearest(
    query: Tensor, slot: Tensor, pos: Tensor, ring: Ring, *, window: int, oldest: int, near: int, far: int,
    deepest: int | None,
) -> Nearest:  # fmt: skip
    everywhere = torch.ones(query.shape[0], ring.kv_heads, dtype=torch.bool, device=query.device)
    return _nearest(query, slot, pos, ring, everywhere, window, oldest, near, far, deepest, torch.inf)


def _nearest(
    query: Tensor, slot: Tensor, pos: Tensor, ring: Ring, on: Tensor, window: int, oldest: int, near: int, far: int,
    deepest: int | None, limit: float,
) -> Nearest:  # fmt: skip
    """on: bool [R, G], where anything is looked for; limit: squared distance that a row has to be below."""
    dtype = accumulator(ring.query.dtype)
    gap = torch.arange(1, window + 1, device=pos.device)
    distances, positions = [], []
    for r in range(query.shape[0]):  # a row at a time: it needs [H, window, D]
        s, at = slot[r].long(), pos[r].long() - gap
        place = at % ring.size
        fits = (ring.stamp[s][place] == at) & (at >= max(oldest, 0)) & (gap >= near) & (gap <= far)
        ok = fits & on[r].repeat_interleave(ring.heads // ring.kv_heads)[:, None]
        if deepest is not None:
            ok = ok & (ring.depth[s][:, place] < deepest)
        mine = query[r].to(dtype)
        apart = ring.query[s][:, place].to(dtype) - mine[:, None]
        distance = (apart * apart).sum(-1)
        distance = torch.where(ok & (distance < limit), distance, torch.inf)  # NaN is below nothing
        alike = (distance <= tie(ring.query.dtype) * (mine * mine).sum(-1)[:, None]) & (distance < torch.inf)
        distance = torch.where(alike, 0.0, distance)
        least = distance.amin(-1)
        found = (distance == least[:, None]) & (distance < torch.inf)
        distances.append(least)
        positions.append(torch.where(found, at, -1).amax(-1))  # among equals the newest
    if not distances:
        return Nearest(query.new_empty(0, ring.heads, dtype=dtype), slot.new_empty(0, ring.heads, dtype=torch.int32))
    return Nearest(torch.stack(distances), torch.stack(positions).int())


def match(
    rows: Rows, slots: Tensor, ring: Ring, rule: Rule, rotary: RotaryAngles | None, weight: Tensor | None
) -> Matched:
    slot, pos = slots[rows.seq.long()].long(), rows.pos.long()
    query = recovered(rows.q, rotary, weight, ring.query.dtype)
    group, count = ring.heads // ring.kv_heads, rows.q.shape[0]

    before = (pos - 1) % ring.size
    known = (ring.stamp[slot, before] == pos - 1) & (pos > 0)
    credit = torch.where(known[:, None], ring.credit[slot, :, before], torch.inf)
    long = (pos + 1 >= rule.min_context)[:, None]
    on, resting = long & (credit >= 0), long & (credit < 0)
    looked = torch.minimum(pos - rule.oldest, torch.full_like(pos, rule.window)).clamp(min=0)[:, None]
    matched = on & (looked > 0)
    found = _nearest(
        query, slot, pos, ring, on, rule.window, rule.oldest, rule.near, rule.far, rule.deepest, rule.limit
    )

    at = found.position.long()
    accepted = at >= 0
    reused = accepted.unflatten(1, (-1, group)).all(2).repeat_interleave(group, 1)
    before_band = torch.where(accepted, at + 1 - rule.band - rule.sinks, 0)  # at least 1, as at >= rule.oldest
    start = torch.where(reused, at + 1 - rule.band, rule.sinks)
    first = start.unflatten(1, (-1, group)).amin(2)
    head = torch.arange(ring.heads, device=pos.device)
    row = (slot[:, None] * ring.heads + head) * ring.size
    place = pos % ring.size
    depth = ring.depth[slot[:, None], head, at.clamp(min=0) % ring.size].int()
    depth = torch.where(reused, depth + 1, 0).clamp(max=DEEPEST)

    gain = torch.where(reused.unflatten(1, (-1, group)).all(2), (first - rule.sinks).to(credit.dtype), 0.0)
    cost = (looked * rule.price).clamp(min=1e-9)
    most = (rule.reuses * (pos + 1 - rule.sinks)[:, None] / cost).clamp(min=rule.patience)
    after = torch.minimum(torch.minimum(credit, most) + gain / cost - 1, most)
    after = torch.where(after < 0, float(-rule.rest), after)
    credit = torch.where(matched, after, torch.where(resting, credit + 1, credit))

    ring.query[slot, :, place] = query
    ring.stamp[slot, place] = pos.int()
    ring.depth[slot, :, place] = depth.to(torch.int16)
    ring.credit[slot, :, place] = credit

    context = (pos + 1)[:, None]
    sinks = context.clamp(max=rule.sinks)
    stream = (context - first).clamp(min=0) + sinks
    vector = ring.query.shape[3] * ring.query.element_size()
    wide = accumulator(ring.query.dtype).itemsize
    each = vector + 4 + (0 if rule.deepest is None else 2)  # query, stamp, depth
    entry = (ring.query.shape[3] + 1) * wide + 2  # out and lse, the depth
    entries = torch.where(reused.unflatten(1, (-1, group)).all(2), group * entry, 0)
    read = torch.where(matched, looked * group * each, 0) + entries + 4 + wide  # the guard's account and its stamp
    gap = torch.where(accepted, pos[:, None] - at, 0).float()
    whole = accepted.unflatten(1, (-1, group)).all(2)
    apart = gap.unflatten(1, (-1, group))
    spread = (apart - apart.mean(2, keepdim=True)).square().mean(2).sqrt().masked_fill(~whole, 0.0)
    columns = [
        matched.repeat_interleave(group, 1),
        accepted,
        reused,
        before_band.float() / context,
        torch.where(reused, start - rule.sinks, 0).float() / context,
        gap,
        spread.repeat_interleave(group, 1),
        (context - start).clamp(min=0) + sinks,
        stream.repeat_interleave(group, 1),
        resting.repeat_interleave(group, 1),
        *((depth >= low) & (depth < high) for low, high in zip(DEPTHS, (*DEPTHS[1:], 1 << 30), strict=True)),
    ]
    assert len(columns) == len(NOTES)
    return Matched(
        start.int(),
        torch.where(reused, row + at % ring.size, -1).int(),
        (row + place[:, None]).int(),
        torch.stack([stream, read], -1).int(),
        torch.stack([c.float().expand(count, ring.heads) for c in columns], -1),
    )


def recovered(q: Tensor, rotary: RotaryAngles | None, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Queries as they are matched: before rotation, times weight [H, D], rounded to the ring's dtype."""
    q = q if rotary is None else rotary.undo(q)
    return q.to(dtype) if weight is None else (q.to(accumulator(dtype)) * weight.to(accumulator(dtype))).to(dtype)
