# mypy: ignore-errors
"""The Triton kernels of attend_sampled: look-ups and attention by parts of the context, and the merge of the parts.

A program looks up a part of the context for all query heads of a KV head. It counts, for each key and head, the tables
in which they met, in shared memory if there is enough: a key's word has `PER` counters, and WORDS words hold those of
all heads. Then it attends to the keys that some head sampled, and to a share of those that are always attended to. So
no list is made for all of the context, and no count leaves the program. If a list is too long, the parts' results are
not used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach.ops.simhash.attention import HEADS as HEADS_OF_A_PROGRAM
from longreach.ops.simhash.triton_kernels import _place, agreement, inclusion, log

HEADS = tl.constexpr(HEADS_OF_A_PROGRAM)  # the least that a tensor core multiplies


@triton.jit
def _words(zero, WORDS: tl.constexpr, SHARED: tl.constexpr):
    """The address of words of shared memory, which Triton itself does not give. To be called once in a kernel."""
    if SHARED:
        return tl.inline_asm_elementwise(
            f"{{ .shared .align 16 .b32 longreach_words[{WORDS}]; mov.u32 $0, longreach_words; }}", "=r,r", [zero],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return zero


@triton.jit
def _put(words, memory, at, value, SHARED: tl.constexpr):
    """Write words."""
    if SHARED:
        tl.inline_asm_elementwise(
            "st.shared.u32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [words + 4 * at, value], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        tl.store(memory + at, value)


@triton.jit
def _count(words, memory, at, one, there, SHARED: tl.constexpr):
    """Add `one` to words. Shared: each element must be of one thread, so there must be as many as threads, or more."""
    if SHARED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p red.shared.add.u32 [$1], $2; mov.u32 $0, 0; }", "=r,r,r,r",
            [words + 4 * tl.where(there, at, 0), one, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_add(memory + at, one, mask=there, sem="relaxed")


@triton.jit
def _word(words, memory, at, there, SHARED: tl.constexpr):
    """Words, 0 elsewhere."""
    if SHARED:
        word = tl.inline_asm_elementwise(
            "ld.shared.u32 $0, [$1];", "=r,r", [words + 4 * tl.where(there, at, 0)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
        return tl.where(there, word, 0)
    else:  # atomics pass the first cache by
        return tl.load(memory + at, mask=there, other=0, cache_modifier=".cg")


@triton.jit
def _look_up(
    codes, ids, id_stride, offsets, table_stride, segment_stride, words, memory, low, high, lowest,
    TABLES: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PER: tl.constexpr, WORDS: tl.constexpr,
    ROOM: tl.constexpr, SHARED: tl.constexpr, WHOLE: tl.constexpr, LOG: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Count the tables in which query heads meet the keys [low, high).

    codes: uint16 [GROUP, TABLES], of the KV head that ids and offsets are of. Buckets differ much in size, so they are
    cut into pieces of 8 ids, and BE pieces are read at a time; three words of each of 2^LOG buckets tell a piece which
    is its own. Returns how many ids are in the buckets of segments that begin in the part.
    """
    BT: tl.constexpr = 1 << LOG
    eight, read = tl.arange(0, 8), 0
    for begin in range(tl.maximum(low // SIZE, lowest // SIZE) * SIZE, high, SIZE):
        for pairs in range(0, GROUP * TABLES, BT):
            lane = tl.arange(0, BT)
            pair = pairs + lane
            mine = pair < GROUP * TABLES
            code = tl.load(codes + pair, mask=mine, other=0).to(tl.int32)
            edges = offsets + pair % TABLES * table_stride + begin // SIZE * segment_stride + code
            first = tl.load(edges, mask=mine, other=0).to(tl.int32)
            end = tl.load(edges + 1, mask=mine, other=0).to(tl.int32)
            read += tl.where(begin >= low, tl.sum(end - first, 0), 0)
            pieces = tl.where(end > first, (end + 7) // 8 - first // 8, 0)
            until = tl.cumsum(pieces, 0)
            tl.debug_barrier()  # the last buckets' words were read
            _put(words, memory, ROOM + lane, until - pieces, SHARED)
            _put(words, memory, ROOM + BT + lane, first, SHARED)
            _put(words, memory, ROOM + 2 * BT + lane, end, SHARED)
            tl.debug_barrier()
            total = tl.sum(pieces, 0)
            for e in range(0, total, BE):
                piece = e + tl.arange(0, BE)
                some = piece < total
                own = tl.zeros([BE], tl.int32)  # the last bucket that begins at the piece or before
                for i in tl.static_range(1, LOG + 1):
                    further = _word(words, memory, ROOM + own + (BT >> i), some, SHARED) <= piece
                    own += tl.where(further, BT >> i, 0)
                head = _word(words, memory, ROOM + BT + own, some, SHARED)
                tail = _word(words, memory, ROOM + 2 * BT + own, some, SHARED)
                piece += head // 8 - _word(words, memory, ROOM + own, some, SHARED)
                own += pairs
                n = (piece * 8)[:, None] + eight[None, :]
                there = some[:, None] & (n >= head[:, None]) & (n < tail[:, None])
                row = ids + begin + (own % TABLES)[:, None] * id_stride + n
                if WHOLE:
                    at = tl.load(row, mask=some[:, None].broadcast_to(BE, 8), other=0).to(tl.int32)
                else:
                    at = tl.load(row, mask=there, other=0).to(tl.int32)
                at += begin
                there &= (at >= low) & (at < high)
                h = (own // TABLES)[:, None]
                word = (at - low) * WORDS + h // PER
                one = (1 << h % PER * (32 // PER)).broadcast_to(BE, 8)
                _count(words, memory, word, one, there, SHARED)
    return read


@triton.jit
def _met(words, memory, at, there, h, least, PER: tl.constexpr, WORDS: tl.constexpr, SHARED: tl.constexpr):
    """bool [positions, HEADS]: the heads that met the keys in `least` tables. at: positions in the part."""
    some = there[:, None] & (h < WORDS * PER)[None, :]
    word = _word(words, memory, at[:, None] * WORDS + (h // PER)[None, :], some, SHARED)
    return _counter(word, (h % PER)[None, :], PER) >= least


@triton.jit
def _counter(word, i, PER: tl.constexpr):
    """The i-th of the PER counters of words."""
    return (word >> i * (32 // PER)) & ((1 << (32 // PER)) - 1)


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
def _vectors(memory, strides, table, table_row, b, g, slot, there, d, D: tl.constexpr, PAGED: tl.constexpr,
             PAGE: tl.constexpr):  # fmt: skip
    """[C, D2]: keys or values at slots."""
    place = _place(strides, table, table_row, b, slot, there, PAGED, PAGE) + g * strides[1]
    return tl.load(memory + place[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _logits(q, k, scale, SOFTCAP: tl.constexpr):
    """fp32 [C, HEADS], and the products without scale."""
    plain = tl.dot(k, tl.trans(q), input_precision="ieee")
    x = plain * scale
    if SOFTCAP > 0:
        x = SOFTCAP * (1.0 - 2.0 / (tl.exp(2.0 * x / SOFTCAP) + 1.0))
    return x, plain


@triton.jit
def attend_parts(
    q, q_strides, k, k_strides, v, v_strides, table, table_row, filled, centre, codes, ids, id_strides, offsets,
    offset_strides, slots, seq, pos, stop, memory, scratch, top, total, out, counts, G, lowest, sinks, least, floor,
    scale, parts, pieces, GROUP: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr, D2: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, TABLES: tl.constexpr, SIZE: tl.constexpr, PER: tl.constexpr,
    WORDS: tl.constexpr, LAW: tl.constexpr, SOFTCAP: tl.constexpr, ROOM: tl.constexpr, SHARED: tl.constexpr,
    WHOLE: tl.constexpr, LOG: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the sampled keys of one part of the context, and to a share of those that are always attended to.

    codes: uint16 [R, H, TABLES]. scratch: int32 [R, G, parts, PART], PART = ROOM / WORDS; memory: [R, G, parts,
    ROOM + 3 2^LOG], for words that are not SHARED. WHOLE: 8 ids can be read at once. Written: top, total fp32 [R, G,
    pieces, HEADS], out fp32 [..., D2], counts int32 [R, G, parts, HEADS + 3]: keys of each head, of any head, heads
    over all keys, ids in the buckets.
    """
    PART: tl.constexpr = ROOM // WORDS
    item, part = tl.program_id(0), tl.program_id(1)
    r, g = item // G, (item % G).to(tl.int64)
    b = tl.load(seq + r).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    reach = tl.minimum(tl.load(pos + r).to(tl.int32) + 1, tl.load(filled + b).to(tl.int32))
    end = tl.load(stop + slot)
    last = tl.minimum(end, reach)
    last = tl.where(last > lowest, last, 0)
    h, d = tl.arange(0, HEADS), tl.arange(0, D2)
    mine = h < GROUP
    row = q + r.to(tl.int64) * q_strides[0] + (g * GROUP + h)[:, None] * q_strides[1] + d[None, :]
    x = tl.load(row, mask=mine[:, None] & (d < D)[None, :], other=0.0)
    m, z = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    o = tl.zeros([HEADS, D2], tl.float32)
    lane = tl.arange(0, BC)
    words = _words(part - part, ROOM + 3 * (1 << LOG), SHARED)
    own_memory = memory + (item.to(tl.int64) * parts + part) * (ROOM + 3 * (1 << LOG))
    room = scratch + (item.to(tl.int64) * parts + part) * PART
    low, wide, w = part * PART, tl.arange(0, BN), tl.arange(0, WORDS)
    number, looked_up = 0, 0
    tl.static_assert(PART // BN < 1 << (32 // PER))  # rounds that a counter of `each` can hold
    each = tl.zeros([BN, WORDS], tl.int32)  # hits of each head, in the places of the counters of tables
    if (end > lowest) & (low < end):  # entries past what the row sees are counted as read
        _put(words, own_memory, tl.arange(0, ROOM), tl.zeros([ROOM], tl.int32), SHARED)
        looked_up = _look_up(
            codes + (r.to(tl.int64) * G + g) * GROUP * TABLES, ids + slot * id_strides[0] + g * id_strides[1],
            id_strides[2], offsets + slot * offset_strides[0] + g * offset_strides[1], offset_strides[2],
            offset_strides[3], words, own_memory, low, tl.minimum(low + PART, end), lowest, TABLES, GROUP, SIZE, PER,
            WORDS, ROOM, SHARED, WHOLE, LOG, BE,
        )  # fmt: skip
        tl.debug_barrier()
    for begin in range(0, tl.minimum(PART, last - low), BN):
        at = begin + wide
        word = _word(words, own_memory, at[:, None] * WORDS + w[None, :], (low + at < last)[:, None], SHARED)
        hits = tl.zeros([BN, WORDS], tl.int32)
        for i in tl.static_range(PER):
            hits += (_counter(word, i, PER) >= least).to(tl.int32) << i * (32 // PER)
        each += hits
        hit = (tl.max(hits, 1) > 0).to(tl.int32)
        tl.store(room + number + tl.cumsum(hit, 0) - 1, low + at, mask=hit > 0)
        number += tl.sum(hit, 0)
    tl.debug_barrier()
    count, all_hits = counts + (item.to(tl.int64) * parts + part) * (HEADS + 3), 0
    for i in tl.static_range(GROUP):
        its = tl.sum(tl.sum(tl.where(w[None, :] == i // PER, _counter(each, i % PER, PER), 0), 1), 0)
        tl.store(count + i, its)
        all_hits += its
    tl.store(count + HEADS, number)
    tl.store(count + HEADS + 1, all_hits)
    tl.store(count + HEADS + 2, looked_up)
    if number > 0:
        xf = x.to(tl.float32)
        square = tl.sum(xf * xf, 1)
        known = (square > 0.0) & (square < float("inf"))
        length = tl.sqrt(tl.where(known, square, 1.0))
        c0 = tl.load(centre + (slot * G + g) * D + d, mask=d < D, other=0.0)
        away = tl.sum(xf * c0[None, :], 1)
        for c in tl.range(0, number, BC, num_stages=STAGES):
            there = c + lane < number
            s = tl.load(room + c + lane, mask=there, other=0)
            kk = _vectors(k, k_strides, table, table_row, b, g, s, there, d, D, PAGED, PAGE)
            vv = _vectors(v, v_strides, table, table_row, b, g, s, there, d, D, PAGED, PAGE)
            y, plain = _logits(x, kk, scale, SOFTCAP)
            dev = tl.where((d < D)[None, :], kk.to(tl.float32) - c0[None, :], 0.0)
            far = tl.sum(dev * dev, 1)
            usable = (far > 0.0) & (far < float("inf"))
            size = tl.sqrt(tl.where(usable, far, 1.0))
            cosine = (plain - away[None, :]) / (length[None, :] * size[:, None])
            both = usable[:, None] & known[None, :]
            cosine = tl.where(both, cosine, tl.where(usable[:, None] | known[None, :], 0.0, 1.0))
            u = tl.maximum(inclusion(agreement(cosine), LAW), floor)
            met = _met(words, own_memory, s - low, there, h, least, PER, WORDS, SHARED)
            if OWN:
                weight = -log(u)
                y = tl.where(met, y + weight, float("-inf"))
            else:
                heads = tl.sum(met.to(tl.float32), 1)
                all_u = tl.sum(tl.where(mine[None, :], u, 0.0), 1)
                weight = log(tl.where(there, heads, 1.0)) - log(tl.where(there, all_u, 1.0))
                y = tl.where(there[:, None], y + weight[:, None], float("-inf"))
            m, z, o = _fold(y, vv, m, z, o)
    sink = tl.minimum(sinks, reach)
    start = tl.maximum(tl.minimum(end, reach), sink)
    always = sink + reach - start
    for c in tl.range(part * BC, always, parts * BC, num_stages=1):
        n = c + lane
        there = n < always
        s = tl.where(n < sink, n, start + n - sink)
        kk = _vectors(k, k_strides, table, table_row, b, g, s, there, d, D, PAGED, PAGE)
        vv = _vectors(v, v_strides, table, table_row, b, g, s, there, d, D, PAGED, PAGE)
        y, _ = _logits(x, kk, scale, SOFTCAP)
        m, z, o = _fold(tl.where(there[:, None], y, float("-inf")), vv, m, z, o)
    place = (item.to(tl.int64) * pieces + part) * HEADS + h
    tl.store(top + place, m)
    tl.store(total + place, z)
    tl.store(out + place[:, None] * D2 + d[None, :], o)


@triton.jit
def attend_rest(
    q, q_strides, k, k_strides, v, v_strides, table, table_row, filled, slots, seq, pos, stop, limit, counts, numbers,
    top, total, out, G, lowest, sinks, scale, parts, edges, BP: tl.constexpr, GROUP: tl.constexpr,
    OWN: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Add up the counts of the parts. Where a list is too long, attend to one of SPLITS pieces of all keys.

    edges: bytes of the offsets that a KV head reads of a segment. numbers, written: int64 [R, G, NUMBERS], see
    `attention.NUMBERS`. top, total, out: as in attend_parts; its entries after those of the parts.
    """
    item, split = tl.program_id(0), tl.program_id(1)
    r, g = item // G, (item % G).to(tl.int64)
    h, d, p, wide = tl.arange(0, HEADS), tl.arange(0, D2), tl.arange(0, BP), tl.arange(0, 2 * HEADS)
    used = (wide < GROUP) | ((wide >= HEADS) & (wide < HEADS + 3))
    some = (p < parts)[:, None] & used[None, :]
    each = counts + (item.to(tl.int64) * parts + p)[:, None] * (HEADS + 3) + wide[None, :]
    sums = tl.sum(tl.load(each, mask=some, other=0), 0)
    most = tl.load(limit + r).to(tl.int32)
    mine = (wide < GROUP) if OWN else (wide == HEADS)
    full = mine & (sums > most)
    fulls = tl.sum(full.to(tl.int32), 0)
    over = fulls > 0
    b = tl.load(seq + r).to(tl.int64)
    reach = tl.minimum(tl.load(pos + r).to(tl.int32) + 1, tl.load(filled + b).to(tl.int32))
    end = tl.load(stop + tl.load(slots + b)).to(tl.int32)
    last, first = tl.minimum(end, reach), tl.minimum(sinks, reach)
    if split == 0:
        union = tl.sum(tl.where(wide == HEADS, sums, 0), 0)
        met = tl.sum(tl.where(wide == HEADS + 1, sums, 0), 0)
        met = tl.sum(tl.where((wide < GROUP) & (full == 0), sums, 0), 0) if OWN else tl.where(over, 0, met)
        always = first + reach - tl.maximum(last, first)
        segments = tl.where(end > lowest, tl.cdiv(end, SIZE) - lowest // SIZE, 0)
        looked_up = tl.sum(tl.where(wide == HEADS + 2, sums, 0), 0)
        read = 2 * looked_up.to(tl.int64) + segments.to(tl.int64) * edges
        column = numbers + item.to(tl.int64) * 7
        tl.store(column, union.to(tl.int64))
        tl.store(column + 1, met.to(tl.int64))
        tl.store(column + 2, fulls.to(tl.int64))
        tl.store(column + 3, tl.where(fulls == (GROUP if OWN else 1), 0, union).to(tl.int64))
        tl.store(column + 4, tl.where(over, reach, union + always).to(tl.int64))
        tl.store(column + 5, read)
        tl.store(column + 6, end.to(tl.int64))
    place = (item.to(tl.int64) * (parts + SPLITS) + parts + split) * HEADS + h
    m, z = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    if over:
        size = tl.cdiv(reach, SPLITS)
        begin = split * size
        until = tl.minimum(begin + size, reach)
        row = q + r.to(tl.int64) * q_strides[0] + (g * GROUP + h)[:, None] * q_strides[1] + d[None, :]
        x = tl.load(row, mask=(h < GROUP)[:, None] & (d < D)[None, :], other=0.0)
        o = tl.zeros([HEADS, D2], tl.float32)
        for c in range(begin, until, BC):
            s = c + tl.arange(0, BC)
            there = s < until
            kk = _vectors(k, k_strides, table, table_row, b, g, s, there, d, D, PAGED, PAGE)
            vv = _vectors(v, v_strides, table, table_row, b, g, s, there, d, D, PAGED, PAGE)
            y, _ = _logits(x, kk, scale, SOFTCAP)
            m, z, o = _fold(tl.where(there[:, None], y, float("-inf")), vv, m, z, o)
        tl.store(out + place[:, None] * D2 + d[None, :], o)
    tl.store(top + place, m)
    tl.store(total + place, z)


@triton.jit
def merge_parts(
    top, total, out, counts, limit, whole, lse, G, parts, splits, GROUP: tl.constexpr, OWN: tl.constexpr,
    D: tl.constexpr, D2: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """out [R, H, D] and lse [R, H] of a query head: of the parts, or of the pieces of all keys if its list is too long.

    BP: at least the number of parts. BM: parts merged at a time.
    """
    item, h = tl.program_id(0), tl.program_id(1)
    p, d, some = tl.arange(0, BP), tl.arange(0, D2), tl.arange(0, BM)
    each = counts + (item.to(tl.int64) * parts + p) * (HEADS + 3) + (h if OWN else HEADS)
    over = tl.sum(tl.load(each, mask=p < parts, other=0), 0) > tl.load(limit + item // G).to(tl.int32)
    first = tl.where(over, parts, 0)
    end = tl.where(over, parts + splits, parts)
    most, z, o = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32), tl.zeros([D2], tl.float32)
    for begin in range(first, end, BM):
        there = begin + some < end
        place = (item.to(tl.int64) * (parts + splits) + begin + some) * HEADS + h
        m = tl.load(top + place, mask=there, other=float("-inf"))
        size = tl.load(total + place, mask=there, other=0.0)
        there &= (m != float("-inf")) | (size != 0.0)  # logits that are all NaN leave no highest one, and a NaN total
        higher = tl.maximum(most, tl.max(m, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        share, before = tl.exp(m - safe), tl.exp(most - safe)
        z = z * before + tl.sum(tl.where(there, share * size, 0.0), 0)
        x = tl.load(out + place[:, None] * D2 + d[None, :], mask=there[:, None], other=0.0)
        o = o * before + tl.sum(tl.where(there[:, None], share[:, None] * x, 0.0), 0)
        most = higher
    nothing = z == 0.0
    head = item.to(tl.int64) * GROUP + h
    tl.store(whole + head * D + d, tl.where(nothing, 0.0, o / tl.where(nothing, 1.0, z)), mask=d < D)
    tl.store(lse + head, tl.where(nothing, float("-inf"), most + tl.log(tl.where(nothing, 1.0, z))))
