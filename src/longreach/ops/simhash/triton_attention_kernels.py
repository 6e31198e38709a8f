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
from longreach.ops.simhash.triton_kernels import _place, agreement, inclusion, log
from longreach.ops.simhash.triton_search_kernels import _put, _word, _words

HEADS = tl.constexpr(HEADS_OF_A_PROGRAM)  # the least that a tensor core multiplies


@triton.jit
def _fold(x, v, top, total, out):
    """Add keys with logits x [C, HEADS] and values v [C, D2] to a running softmax."""
    most = tl.maximum(top, tl.max(x, 0))
    safe = tl.where(most == float("-inf"), 0.0, most)
    p = tl.exp(x - safe[None, :])
    fewer = tl.exp(top - safe)
    total = total * fewer + tl.sum(p, 0)
    out = out * fewer[:, None] + tl.dot(tl.trans(p).to(v.dtype), v, input_precision="ieee")
    return most, total, out


@triton.jit
def _vectors(memory, strides, table, table_row, b, g, slot, there, d, D: tl.constexpr, D2: tl.constexpr,
             PAGED: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """[C, D2]: keys or values at slots."""
    place = _place(strides, table, table_row, b, slot, there, PAGED, PAGE) + g * strides[1]
    some = there[:, None]
    if D != D2:
        some &= (d < D)[None, :]
    return tl.load(memory + place[:, None] + d[None, :], mask=some, other=0.0)


@triton.jit
def _logits(q, k, scale, SOFTCAP: tl.constexpr):
    """fp32 [C, HEADS], and the products without scale."""
    plain = tl.dot(k, tl.trans(q), input_precision="ieee")
    x = plain * scale
    if SOFTCAP > 0:
        x = SOFTCAP * (1.0 - 2.0 / (tl.exp(2.0 * x / SOFTCAP) + 1.0))
    return x, plain


@triton.jit
def _log_weights(
    cosine, entry, there, words, memory, floor, GROUP: tl.constexpr, WIDE: tl.constexpr, OWN: tl.constexpr,
    LAW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """fp32 [BC, HEADS]: what the logits of sampled keys get added, of cosines [BC, HEADS] and entries [BC] of a list.

    Shared memory deals the cosines of heads below WIDE evenly to all threads, and the weights back. Without it Triton
    would compute weights for the masked heads too, and once more for each layout of what follows. words: BC (WIDE + 1)
    + 1 of them.
    """
    c, h, each = tl.arange(0, BC), tl.arange(0, HEADS), tl.arange(0, BC * WIDE)
    place = c[:, None] * WIDE + tl.minimum(h, WIDE - 1)[None, :]
    tl.debug_barrier()  # the last weights were read
    _put(words, memory, tl.where(h[None, :] < WIDE, place, BC * (WIDE + 1)), cosine.to(tl.int32, bitcast=True))
    tl.debug_barrier()
    p = agreement(_word(words, memory, each).to(tl.float32, bitcast=True))
    u = tl.maximum(inclusion(p, LAW), floor)
    _put(words, memory, each, (-log(u) if OWN else u).to(tl.int32, bitcast=True))
    tl.debug_barrier()
    if OWN:
        return _word(words, memory, place).to(tl.float32, bitcast=True)
    met, total = tl.zeros([BC], tl.int32), tl.zeros([BC], tl.float32)
    for i in tl.static_range(GROUP):
        total += _word(words, memory, c * WIDE + i).to(tl.float32, bitcast=True)
        met += (entry >> (16 + i)) & 1
    weight = log(tl.where(there, met.to(tl.float32), 1.0)) - log(tl.where(there, total, 1.0))
    _put(words, memory, BC * WIDE + c, weight.to(tl.int32, bitcast=True))
    tl.debug_barrier()
    weight = _word(words, memory, BC * WIDE + c).to(tl.float32, bitcast=True)
    return weight[:, None].broadcast_to(BC, HEADS)


@triton.jit
def attend_parts(
    q, q_strides, k, k_strides, v, v_strides, table, table_row, filled, centre, slots, seq, pos, stop, limit, found,
    counts, memory, numbers, top, total, out, G, lowest, sinks, floor, scale, parts, edges, GROUP: tl.constexpr,
    OWN: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, LAW: tl.constexpr, SOFTCAP: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Attend to a share of one part's keys, and of those that are always attended to.

    found, counts: as search_parts writes them. memory: int32 [R, G, parts SPLITS, BC (WIDE + 1) + 1], for the
    interpreter, which has no shared memory. edges: bytes of the offsets that a KV head reads of a segment. Written:
    top, total fp32 [R, G, parts SPLITS, GROUP], out fp32 [..., D2], where total is not 0, and numbers int64 [R, G,
    NUMBERS], see `attention.NUMBERS`.
    """
    item, piece = tl.program_id(0), tl.program_id(1)
    part, split = piece // SPLITS, piece % SPLITS
    r, g = item // G, (item % G).to(tl.int64)
    h, d, p, wide = tl.arange(0, HEADS), tl.arange(0, D2), tl.arange(0, BP), tl.arange(0, 2 * HEADS)
    mine, lane = h < GROUP, tl.arange(0, BC)
    row = q + r.to(tl.int64) * q_strides[0] + (g * GROUP + h)[:, None] * q_strides[1] + d[None, :]
    x = tl.load(row, mask=mine[:, None] & (d < D)[None, :], other=0.0)
    used = (wide < GROUP) | ((wide >= HEADS) & (wide < HEADS + 3))
    some = (p < parts)[:, None] & used[None, :]
    first_part = item.to(tl.int64) * parts
    b = tl.load(seq + r).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    reach = tl.minimum(tl.load(pos + r).to(tl.int32) + 1, tl.load(filled + b).to(tl.int32))
    end = tl.load(stop + slot).to(tl.int32)
    most = tl.load(limit + r).to(tl.int32)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    each = tl.load(counts + (first_part + p)[:, None] * (HEADS + 3) + wide[None, :], mask=some, other=0)
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
    m, z = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    o = tl.zeros([HEADS, D2], tl.float32)
    low = part * PART
    words = _words(part - part, BC * (WIDE + 1) + 1)
    own_memory = memory + (item.to(tl.int64) * tl.num_programs(1) + piece) * (BC * (WIDE + 1) + 1)
    if (number > 0) & (OWN | (not over)):
        xf = x.to(tl.float32)
        square = tl.sum(xf * xf, 1)
        known = (square > 0.0) & (square < float("inf"))
        length = tl.rsqrt(tl.where(known, square, 1.0))
        c0 = tl.load(centre + (slot * G + g) * D + d, mask=d < D, other=0.0)
        away = tl.sum(xf * c0[None, :], 1)
        entries = found + (first_part + part) * PART
        for c in tl.range(split * BC, number, SPLITS * BC, num_stages=1):
            there = c + lane < number
            entry = tl.load(entries + c + lane, mask=there, other=0)
            s = low + (entry & 0xFFFF)
            kk = _vectors(k, k_strides, table, table_row, b, g, s, there, d, D, D2, PAGED, PAGE)
            vv = _vectors(v, v_strides, table, table_row, b, g, s, there, d, D, D2, PAGED, PAGE)
            y, plain = _logits(x, kk, scale, SOFTCAP)
            dev = kk.to(tl.float32) - c0[None, :]  # 0 past D, where both are
            far = tl.sum(dev * dev, 1)
            usable = (far > 0.0) & (far < float("inf"))
            size = tl.rsqrt(tl.where(usable, far, 1.0))
            cosine = (plain - away[None, :]) * (length[None, :] * size[:, None])
            both = usable[:, None] & known[None, :]
            cosine = tl.where(both, cosine, tl.where(usable[:, None] | known[None, :], 0.0, 1.0))
            y += _log_weights(cosine, entry, there, words, own_memory, floor, GROUP, WIDE, OWN, LAW, BC)
            if OWN:
                met = ((entry >> 16)[:, None] >> h[None, :]) & 1
                y = tl.where((met > 0) & ~dense[None, :], y, float("-inf"))
            else:
                y = tl.where(there[:, None], y, float("-inf"))
            m, z, o = _fold(y, vv, m, z, o)
    if over:
        until = tl.minimum(low + PART, start)
        for c in tl.range(tl.maximum(low, sink) + split * BC, until, SPLITS * BC, num_stages=1):
            s = c + lane
            there = s < until
            kk = _vectors(k, k_strides, table, table_row, b, g, s, there, d, D, D2, PAGED, PAGE)
            vv = _vectors(v, v_strides, table, table_row, b, g, s, there, d, D, D2, PAGED, PAGE)
            y, _ = _logits(x, kk, scale, SOFTCAP)
            m, z, o = _fold(tl.where(there[:, None] & dense[None, :], y, float("-inf")), vv, m, z, o)
    for c in tl.range(piece * BC, always, parts * SPLITS * BC, num_stages=1):
        n = c + lane
        there = n < always
        s = tl.where(n < sink, n, start + n - sink)
        kk = _vectors(k, k_strides, table, table_row, b, g, s, there, d, D, D2, PAGED, PAGE)
        vv = _vectors(v, v_strides, table, table_row, b, g, s, there, d, D, D2, PAGED, PAGE)
        y, _ = _logits(x, kk, scale, SOFTCAP)
        m, z, o = _fold(tl.where(there[:, None], y, float("-inf")), vv, m, z, o)
    place = (first_part * SPLITS + piece) * GROUP + h
    tl.store(top + place, m, mask=mine)
    tl.store(total + place, z, mask=mine)
    tl.store(out + place[:, None] * D2 + d[None, :], o, mask=(mine & (z != 0.0))[:, None])
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
