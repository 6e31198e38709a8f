# mypy: ignore-errors
"""The Triton kernel of attend_sampled that finds the sampled keys, part of the context by part.

A program looks up a part for all query heads of a KV head. It counts in shared memory, for each key and head, the
tables in which they met: a key's word has `PER` counters, and WORDS words hold those of all heads. So no count leaves
the program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.simhash.attention import HEADS as HEADS_OF_A_PROGRAM
from longreach.ops.simhash.triton_kernels import INTERPRETED

HEADS = tl.constexpr(HEADS_OF_A_PROGRAM)


@triton.jit
def _words(zero, WORDS: tl.constexpr):
    """The address of words of shared memory, which Triton itself does not give. To be called once in a kernel."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(
            f"{{ .shared .align 16 .b32 longreach_words[{WORDS}]; mov.u32 $0, longreach_words; }}", "=r,r", [zero],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return zero


@triton.jit
def _put(words, memory, at, value):
    """Write words."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "st.shared.u32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [words + 4 * at, value], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        tl.store(memory + at, value)


@triton.jit
def _count(words, memory, at, one):
    """Add `one` to words. Shared: each element must be of one thread, so there must be as many as threads, or more."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "red.shared.add.u32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [words + 4 * at, one], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_add(memory + at, one, sem="relaxed")


@triton.jit
def _word(words, memory, at):
    """Read words."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(
            "ld.shared.u32 $0, [$1];", "=r,r", [words + 4 * at], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    else:
        return tl.load(memory + at)


@triton.jit
def _look_up(
    codes, ids, id_stride, offsets, table_stride, segment_stride, words, memory, low, high, lowest,
    TABLES: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PER: tl.constexpr, WORDS: tl.constexpr,
    ROOM: tl.constexpr, WHOLE: tl.constexpr, LOG: tl.constexpr, BE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Count the tables in which query heads meet the keys [low, high).

    codes: uint16 [GROUP, TABLES], of the KV head that ids and offsets are of. Buckets differ much in size, so they are
    cut into pieces of EACH ids, and BE pieces are read at a time; three words of each of 2^LOG buckets tell a piece
    which is its own. Returns how many ids are in the buckets of segments that begin in the part.
    """
    BT: tl.constexpr = 1 << LOG
    PART: tl.constexpr = ROOM // WORDS
    every, read = tl.arange(0, EACH), 0
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
            pieces = tl.where(end > first, (end + EACH - 1) // EACH - first // EACH, 0)
            until = tl.cumsum(pieces, 0)
            tl.debug_barrier()  # the last buckets' words were read
            _put(words, memory, ROOM + lane, until - pieces)
            _put(words, memory, ROOM + BT + lane, first)
            _put(words, memory, ROOM + 2 * BT + lane, end)
            tl.debug_barrier()
            total = tl.sum(pieces, 0)
            for e in range(0, total, BE):
                piece = e + tl.arange(0, BE)
                own = tl.zeros([BE], tl.int32)  # the last bucket that begins at the piece or before
                for i in tl.static_range(1, LOG + 1):
                    further = _word(words, memory, ROOM + own + (BT >> i)) <= piece
                    own += tl.where(further, BT >> i, 0)
                # through memory, as Triton would search once more for each layout of what follows
                its = ROOM + 3 * BT + e // BE % 2 * BE + tl.arange(0, BE)
                _put(words, memory, its, own)
                tl.debug_barrier()
                own = _word(words, memory, its)
                head = _word(words, memory, ROOM + BT + own)
                tail = _word(words, memory, ROOM + 2 * BT + own)
                n = (piece + head // EACH - _word(words, memory, ROOM + own)) * EACH
                length = tl.where(piece < total, tail - head, 0).to(tl.uint32)[:, None]
                own += pairs
                there = (n - head)[:, None] + every[None, :]
                there = there.to(tl.uint32) < length  # not below 0 either
                row = ids + begin + (own % TABLES * id_stride + n)[:, None] + every[None, :]
                if WHOLE:
                    at = tl.load(row, mask=(piece < total)[:, None].broadcast_to(BE, EACH), other=0).to(tl.int32)
                else:
                    at = tl.load(row, mask=there, other=0).to(tl.int32)
                at += begin - low
                h = own // TABLES
                one = (1 << h % PER * (32 // PER))[:, None]
                word = (at & (PART - 1)) * WORDS + (h // PER)[:, None]  # in the part, whatever was read
                one = tl.where(there, one, 0)  # ptxas handles `and` of such conditions badly
                _count(words, memory, word, tl.where(at.to(tl.uint32) < (high - low).to(tl.uint32), one, 0))
    return read


@triton.jit
def _counter(word, i, PER: tl.constexpr):
    """The i-th of the PER counters of words."""
    return (word >> i * (32 // PER)) & ((1 << (32 // PER)) - 1)


@triton.jit
def search_parts(
    codes, ids, id_strides, offsets, offset_strides, slots, seq, pos, filled, stop, memory, found, counts, G, lowest,
    least, parts, GROUP: tl.constexpr, TABLES: tl.constexpr, SIZE: tl.constexpr, PER: tl.constexpr,
    WORDS: tl.constexpr, ROOM: tl.constexpr, WHOLE: tl.constexpr, LOG: tl.constexpr, BE: tl.constexpr,
    EACH: tl.constexpr, BN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The keys of one part of the context that some query head of a KV head sampled.

    codes: uint16 [R, H, TABLES]. memory: int32 [R, G, parts, ROOM + 3 2^LOG + 2 BE], for the interpreter, which has no
    shared memory. WHOLE: EACH ids can be read at once. Written, with PART = ROOM / WORDS: found int32 [R, G, parts,
    PART], positions in the part, ascending, and 2^16 times the heads as bits; counts int32 [R, G, parts, HEADS + 3]:
    keys of each head, of any head, heads over all keys, ids in the buckets.
    """
    PART: tl.constexpr = ROOM // WORDS
    BITS: tl.constexpr = 32 // PER
    tl.static_assert((PER == 4) | (PER == 2))
    ONES: tl.constexpr = 0x01010101 if PER == 4 else 0x00010001  # each counter's lowest bit
    LOW: tl.constexpr = ONES * ((1 << (BITS - 1)) - 1)  # all bits of counters but the highest
    GATHER: tl.constexpr = 0x01020408 if PER == 4 else 0x00010002  # moves lowest bits next to each other
    item, part = tl.program_id(0), tl.program_id(1)
    r, g = item // G, (item % G).to(tl.int64)
    b = tl.load(seq + r).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    reach = tl.minimum(tl.load(pos + r).to(tl.int32) + 1, tl.load(filled + b).to(tl.int32))
    end = tl.load(stop + slot)
    last = tl.minimum(end, reach)
    last = tl.where(last > lowest, last, 0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    words = _words(part - part, ROOM + 3 * (1 << LOG) + 2 * BE)
    whole = item.to(tl.int64) * parts + part
    own_memory = memory + whole * (ROOM + 3 * (1 << LOG) + 2 * BE)
    room = found + whole * PART
    low, wide, w = part * PART, tl.arange(0, BN), tl.arange(0, WORDS)
    number, looked_up = 0, 0
    tl.static_assert(PART // BN < 1 << BITS)  # rounds that a counter of `each` can hold
    each = tl.zeros([BN, WORDS], tl.int32)  # hits of each head, in the places of the counters of tables
    if (end > lowest) & (low < end):  # entries past what the row sees are counted as read
        _put(words, own_memory, tl.arange(0, ROOM), tl.zeros([ROOM], tl.int32))
        looked_up = _look_up(
            codes + (r.to(tl.int64) * G + g) * GROUP * TABLES, ids + slot * id_strides[0] + g * id_strides[1],
            id_strides[2], offsets + slot * offset_strides[0] + g * offset_strides[1], offset_strides[2],
            offset_strides[3], words, own_memory, low, tl.minimum(low + PART, end), lowest, TABLES, GROUP, SIZE, PER,
            WORDS, ROOM, WHOLE, LOG, BE, EACH,
        )  # fmt: skip
        tl.debug_barrier()
    for begin in range(0, tl.minimum(PART, last - low), BN):
        at = begin + wide
        there = (low + at < last)[:, None]
        word = tl.where(there, _word(words, own_memory, at[:, None] * WORDS + w[None, :]), 0)
        hits = ((((word & LOW) + (LOW - (least - 1) * ONES)) | word) >> (BITS - 1)) & ONES
        each += hits
        heads = ((hits * GATHER) >> (32 - BITS)) & ((1 << PER) - 1)
        heads = tl.sum(heads << (w * PER)[None, :], 1)
        some = (heads > 0).to(tl.int32)
        tl.store(room + number + tl.cumsum(some, 0) - 1, at | heads << 16, mask=some > 0)
        number += tl.sum(some, 0)
    fields = tl.zeros([BN, WORDS], tl.int64)
    for i in tl.static_range(PER):
        fields += _counter(each, i, PER).to(tl.int64) << 16 * i
    fields, all_hits = tl.sum(fields, 0), 0
    count = counts + whole * (HEADS + 3)
    for i in tl.static_range(PER):
        hits = ((fields >> 16 * i) & 0xFFFF).to(tl.int32)
        tl.store(count + w * PER + i, hits, mask=w * PER + i < GROUP)
        all_hits += tl.sum(hits, 0)
    tl.store(count + HEADS, number)
    tl.store(count + HEADS + 1, all_hits)
    tl.store(count + HEADS + 2, looked_up)
