# mypy: ignore-errors
"""The Triton kernels of attend_sampled that attend: to what was found in parts of the context, and the merge.

A program attends to the keys that some query head of a KV head sampled in a part of the context, and to a share of
those that are always attended to. Heads whose list is too long attend to all keys of the part instead.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.simhash.attention import HEADS as HEADS_OF_A_PROGRAM
from longreach.ops.simhash.triton_kernels import agreement, inclusion
from longreach.ops.triton_reads import peek

HEADS = tl.constexpr(HEADS_OF_A_PROGRAM)


@triton.jit
def _logits(q, k, scale, SOFTCAP: tl.constexpr):
    """fp32 [C, H], and the products without scale."""
    plain = tl.dot(k, tl.trans(q), input_precision="ieee")
    x = plain * scale
    if SOFTCAP > 0:
        x = SOFTCAP * (1.0 - 2.0 / (tl.exp(2.0 * x / SOFTCAP) + 1.0))
    return x, plain


@triton.jit
def _log_weights(cosine, heads, floor, GROUP: tl.constexpr, H: tl.constexpr, OWN: tl.constexpr, LAW: tl.constexpr):
    """fp32 [BC, H]: what the logits of sampled keys get added, of cosines [BC, H] and heads' bits [BC].

    tl.log errs by 2e-7, as little as fp32 can hold of a logit.
    """
    u = tl.maximum(inclusion(agreement(cosine), LAW), floor)
    if OWN:
        return -tl.log(u)
    h = tl.arange(0, H)
    total = tl.sum(tl.where((h < GROUP)[None, :], u, 0.0), 1)
    met = tl.sum((heads[:, None] >> h[None, :]) & 1, 1)
    return tl.log(tl.maximum(met, 1).to(tl.float32) / total)[:, None].broadcast_to(cosine.shape)


@triton.jit
def _share(count, split, splits):
    """(first, number): a split's share of so many things."""
    each = tl.cdiv(count, splits)
    return split * each, tl.maximum(tl.minimum(each, count - split * each), 0)


@triton.jit
def _keys(keys, n, entry, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """(slots, heads that sampled each, inverse norms of sampled ones, pages) of the n-th keys of a program. entry: of
    the list, for sampled ones.
    """
    entries, norms, table, low, listed, lowest, all_of, near, few, sink, start = keys
    last = near + n - listed - all_of
    other = tl.where(n < listed + all_of, lowest + n - listed, tl.where(last < sink, last, start + last - sink))
    s = tl.where(n < listed, low + (entry & 0xFFFF), other)
    norm = peek(norms + s, n < listed).to(tl.float32, bitcast=True)
    page = peek(table + s // PAGE, n < listed + all_of + few) if PAGED else s
    return s, entry >> 16, norm, page


@triton.jit
def attend_parts(
    q, q_strides, k, k_strides, v, v_strides, table, table_row, filled, centre, norms, norm_strides, slots, seq, pos,
    stop, limit, found, counts, numbers, top, total, out, G, lowest, sinks, floor, scale, parts, edges,
    GROUP: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, LAW: tl.constexpr, SOFTCAP: tl.constexpr, PART: tl.constexpr,
    SPLITS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, H: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Attend to a share of one part's keys, and of those that are always attended to.

    found, counts: as search_parts writes them. edges: bytes of the offsets that a KV head reads of a segment. H: GROUP
    or more heads, as tensor cores take them. Written: top, total fp32 [R, G, parts SPLITS, GROUP], out fp32 [..., D2],
    where total is not 0, and numbers int64 [R, G, NUMBERS], see `attention.NUMBERS`.
    """
    item, piece = tl.program_id(0), tl.program_id(1)
    part, split = piece // SPLITS, piece % SPLITS
    r, g = item // G, (item % G).to(tl.int64)
    h, d, p, wide = tl.arange(0, H), tl.arange(0, D2), tl.arange(0, BP), tl.arange(0, 2 * HEADS)
    mine, lane, inside = h < GROUP, tl.arange(0, BC), d < D
    row = q + r.to(tl.int64) * q_strides[0] + (g * GROUP + h)[:, None] * q_strides[1] + d[None, :]
    x = tl.load(row, mask=mine[:, None] & inside[None, :], other=0.0)
    used = (wide < GROUP) | ((wide >= HEADS) & (wide < HEADS + 3))
    counted = (p < parts)[:, None] & used[None, :]
    first_part = item.to(tl.int64) * parts
    b = tl.load(seq + r).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    reach = tl.minimum(tl.load(pos + r).to(tl.int32) + 1, tl.load(filled + b).to(tl.int32))
    end = tl.load(stop + slot).to(tl.int32)
    most = tl.load(limit + r).to(tl.int32)
    xf = x.to(tl.float32)
    square = tl.sum(xf * xf, 1)
    known = (square > 0.0) & (square < float("inf"))
    length = tl.rsqrt(tl.where(known, square, 1.0))
    c0 = tl.load(centre + (slot * G + g) * D + d, mask=inside, other=0.0)
    away = tl.sum(xf * c0[None, :], 1)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    each = tl.load(counts + (first_part + p)[:, None] * (HEADS + 3) + wide[None, :], mask=counted, other=0)
    sums = tl.sum(each, 0)
    number = tl.sum(tl.sum(tl.where((p == part)[:, None] & (wide == HEADS)[None, :], each, 0), 1), 0)
    full = ((wide < GROUP) if OWN else (wide == HEADS)) & (sums > most)
    fulls = tl.sum(full.to(tl.int32), 0)
    over = fulls > 0
    if OWN:  # as `full`, by head
        dense = tl.sum((full[None, :] & (wide[None, :] == h[:, None])).to(tl.int32), 1) > 0
    else:
        dense = mine & over
    sink = tl.minimum(sinks, reach)
    start = tl.maximum(tl.minimum(end, reach), sink)
    always = sink + reach - start
    low = part * PART
    # the program's keys: of the list, then all of the part if a list was too long, then of those always attended to
    begin, listed = _share(tl.where(over & (not OWN), 0, number), split, SPLITS)
    entries = found + (first_part + part) * PART + begin
    lowest_here = tl.maximum(low, sink)
    rest = tl.where(over, tl.maximum(tl.minimum(low + PART, start) - lowest_here, 0), 0)
    begin, all_of = _share(rest, split, SPLITS)
    lowest_here += begin
    near, few = _share(always, piece, parts * SPLITS)
    own_norms = norms + slot * norm_strides[0] + g * norm_strides[1]
    keys = (entries, own_norms, table + b * table_row, low, listed, lowest_here, all_of, near, few, sink, start)
    m, z = tl.full([H], float("-inf"), tl.float32), tl.zeros([H], tl.float32)
    o = tl.zeros([D2, H], tl.float32)
    # entries are read two rounds ahead, norms and pages one, so that no load waits for another
    s, heads, norm, page = _keys(keys, lane, peek(entries + lane, lane < listed), PAGED, PAGE)
    ahead = peek(entries + BC + lane, BC + lane < listed)
    for c in tl.range(0, listed + all_of + few, BC, num_stages=STAGES):
        n = c + lane
        next_s, next_heads, next_norm, next_page = _keys(keys, n + BC, ahead, PAGED, PAGE)
        ahead = peek(entries + 2 * BC + n, 2 * BC + n < listed)
        there, sampled = n < listed + all_of + few, n < listed
        if PAGED:
            at_k = page.to(tl.int64) * k_strides[0] + (s % PAGE).to(tl.int64) * k_strides[2] + g * k_strides[1]
            at_v = page.to(tl.int64) * v_strides[0] + (s % PAGE).to(tl.int64) * v_strides[2] + g * v_strides[1]
        else:
            at_k = b * k_strides[0] + s.to(tl.int64) * k_strides[2] + g * k_strides[1]
            at_v = b * v_strides[0] + s.to(tl.int64) * v_strides[2] + g * v_strides[1]
        some, some_v = there[:, None], there[None, :]
        if D != D2:
            some, some_v = some & inside[None, :], some_v & inside[:, None]
        kk = tl.load(k + at_k[:, None] + d[None, :], mask=some, other=0.0)
        # transposed as it is read, so that it goes to the tensor cores without a detour through registers
        vv = tl.load(v + at_v[None, :] + d[:, None], mask=some_v, other=0.0)
        y, plain = _logits(x, kk, scale, SOFTCAP)
        usable = norm > 0.0
        cosine = (plain - away[None, :]) * (length[None, :] * norm[:, None])
        cosine = tl.where(
            usable[:, None] & known[None, :], cosine, tl.where(usable[:, None] | known[None, :], 0.0, 1.0)
        )
        y += tl.where(sampled[:, None], _log_weights(cosine, heads, floor, GROUP, H, OWN, LAW), 0.0)
        seen = there[:, None]
        if OWN:
            met = ((heads[:, None] >> h[None, :]) & 1) > 0
            seen &= tl.where(sampled[:, None], met & ~dense[None, :], (n >= listed + all_of)[:, None] | dense[None, :])
        y = tl.where(seen, y, float("-inf"))
        higher = tl.maximum(m, tl.max(y, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        w, fewer = tl.exp(y - safe[None, :]), tl.exp(m - safe)
        m, z = higher, z * fewer + tl.sum(w, 0)
        o = tl.dot(vv, w.to(vv.dtype), o * fewer[None, :], input_precision="ieee")
        s, heads, norm, page = next_s, next_heads, next_norm, next_page
    place = (first_part * SPLITS + piece) * GROUP + h
    tl.store(top + place, m, mask=mine)
    tl.store(total + place, z, mask=mine)
    tl.store(out + place[None, :] * D2 + d[:, None], o, mask=(mine & (z != 0.0))[None, :])
    if piece == 0:
        union = tl.sum(tl.where(wide == HEADS, sums, 0), 0)
        hits = tl.sum(tl.where(wide == HEADS + 1, sums, 0), 0)
        hits = tl.sum(tl.where((wide < GROUP) & (full == 0), sums, 0), 0) if OWN else tl.where(over, 0, hits)
        segments = tl.where(end > lowest, tl.cdiv(end, SIZE) - lowest // SIZE, 0)
        looked_up = tl.sum(tl.where(wide == HEADS + 2, sums, 0), 0)
        read = 2 * looked_up.to(tl.int64) + segments.to(tl.int64) * edges
        column = numbers + item.to(tl.int64) * 7
        tl.store(column, union.to(tl.int64))
        tl.store(column + 1, hits.to(tl.int64))
        tl.store(column + 2, fulls.to(tl.int64))
        tl.store(column + 3, tl.where(fulls == (GROUP if OWN else 1), 0, union).to(tl.int64))
        tl.store(column + 4, tl.where(over, reach, union + always).to(tl.int64))
        tl.store(column + 5, read)
        tl.store(column + 6, end.to(tl.int64))


@triton.jit
def merge_parts(
    top, total, out, whole, lse, pieces, GROUP: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, BM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """out [R, H, D] and lse [R, H] of a query head, from those of the pieces. BM: pieces merged at a time."""
    item, h = tl.program_id(0), tl.program_id(1)
    if CHAINED:
        gdc_wait()
    d, some = tl.arange(0, D2), tl.arange(0, BM)
    most, z, o = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32), tl.zeros([D2], tl.float32)
    for begin in range(0, pieces, BM):
        there = begin + some < pieces
        place = (item.to(tl.int64) * pieces + begin + some) * GROUP + h
        m = tl.load(top + place, mask=there, other=float("-inf"))
        size = tl.load(total + place, mask=there, other=0.0)
        x = tl.load(out + place[:, None] * D2 + d[None, :], mask=there[:, None], other=0.0)
        there &= size != 0.0  # NaN, of logits that are all NaN, is not 0
        higher = tl.maximum(most, tl.max(m, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        share, before = tl.exp(m - safe), tl.exp(most - safe)
        z = z * before + tl.sum(tl.where(there, share * size, 0.0), 0)
        o = o * before + tl.sum(tl.where(there[:, None], share[:, None] * x, 0.0), 0)
        most = higher
    nothing = z == 0.0
    head = item.to(tl.int64) * GROUP + h
    tl.store(whole + head * D + d, tl.where(nothing, 0.0, o / tl.where(nothing, 1.0, z)), mask=d < D)
    tl.store(lse + head, tl.where(nothing, float("-inf"), most + tl.log(tl.where(nothing, 1.0, z))))
