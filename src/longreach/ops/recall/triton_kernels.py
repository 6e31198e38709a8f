# mypy: ignore-errors
"""The Triton kernels of recall: scores of blocks, and the choice of the highest."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
LOG2E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(-(1 << 63))  # below the key of every block
FULL = tl.constexpr((1 << 63) - 1)  # above them
FAR = tl.constexpr((1 << 31) - 1)  # past every block


@triton.jit
def range_of(row, there, seq_of, start_of, stop_of, held, STARTS: tl.constexpr):
    """Sequence of rows, and the blocks [low, high) that they may choose."""
    seq = tl.load(seq_of + row, mask=there, other=0).to(tl.int32)
    high = tl.load(stop_of + row, mask=there, other=0).to(tl.int32)
    high = tl.minimum(high, tl.load(held + seq, mask=there, other=0).to(tl.int32))
    low = tl.zeros_like(high)
    if STARTS:
        low = tl.maximum(tl.load(start_of + row, mask=there, other=0), 0).to(tl.int32)
    return seq, low, high


@triton.jit
def _keys(s, block, there):
    """Scores with their blocks as int64: larger for higher scores, among equal ones for later blocks. NaN is -inf."""
    s = tl.where(s != s, float("-inf"), s)
    bits = tl.where(s == 0.0, 0, s.to(tl.int32, bitcast=True))
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(there, (order.to(tl.int64) << 32) | block.to(tl.int64), NONE)


@triton.jit
def _codes(memory, seq, page, g, block, inside, d, F: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """Codes [BN, F2] of blocks of a sequence and KV head. page: where all of them lie, unless PAGED."""
    codes, page_stride, head_stride, unit_stride, _, table, table_row = memory
    if PAGED:
        to = table + seq.to(tl.int64) * table_row + block // PAGE
        page = tl.load(to, mask=inside, other=0).to(tl.int64)
        place = page * page_stride + (block % PAGE).to(tl.int64) * unit_stride
    else:
        place = page * page_stride + block.to(tl.int64) * unit_stride
    from_codes = codes + g * head_stride + place
    return tl.load(from_codes[:, None] + d[None, :], mask=inside[:, None] & (d < F)[None, :], other=0.0)


@triton.jit
def score(
    q, seq_of, start_of, stop_of, memory, out, rows, units, scale, G: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, T: tl.constexpr, M: tl.constexpr, F: tl.constexpr, F2: tl.constexpr, BN: tl.constexpr,
    STARTS: tl.constexpr, SUM: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, TABLED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (tile of T rows and KV head, share): every share-th chunk of BN blocks, sequence by sequence.

    Rows come in any order; those of one sequence share its codes. M: rows x heads of a tile, WIDE a row, WIDE the power
    of two from GROUP on. q: (q, row and head stride). memory: (codes, page, head and unit stride; blocks of each
    sequence, block table, its row stride). out: fp32 logits [rows, G * GROUP, units], or their sums over a group
    [rows, G, units] where SUM.
    """
    if CHAINED:
        gdc_wait()
    held, table, table_row = memory[4], memory[5], memory[6]
    stream = tl.program_id(0)
    tile, g = stream // G, (stream % G).to(tl.int64)
    m = tl.arange(0, M)
    d = tl.arange(0, F2)
    n = tl.arange(0, BN)
    row = tile * T + m // WIDE
    there = (m < T * WIDE) & (row < rows)
    seq, low, high = range_of(row, there, seq_of, start_of, stop_of, held, STARTS)
    head = m % WIDE
    there = there & (head < GROUP)
    left = there & (low < high)
    row = row.to(tl.int64)
    from_q = q[0] + row * q[1] + (g * GROUP + head) * q[2]
    x = tl.load(from_q[:, None] + d[None, :], mask=left[:, None] & (d < F)[None, :], other=0.0)
    to = out + (row * G + g) * units if SUM else out + (row * G * GROUP + g * GROUP + head) * units
    while tl.max(left.to(tl.int32), 0) != 0:
        now = tl.min(tl.where(left, seq, FAR), 0)
        mine = left & (seq == now)
        begin = tl.min(tl.where(mine, low, FAR), 0)
        end = tl.max(tl.where(mine, high, 0), 0)
        left = left & (seq != now)
        page = now.to(tl.int64)
        if TABLED and not PAGED:
            page = tl.load(table + page * table_row).to(tl.int64)
        for at in range(begin + tl.program_id(1) * BN, end, tl.num_programs(1) * BN):
            block = at + n
            inside = block < end
            c = _codes(memory, now, page, g, block, inside, d, F, PAGED, PAGE)
            y = tl.dot(x, tl.trans(c), input_precision="ieee")
            seen = mine[:, None] & (block[None, :] >= low[:, None]) & (block[None, :] < high[:, None])
            if SUM:  # scaled once, so that equal sums of integers stay equal
                y = tl.sum(tl.reshape(tl.where(mine[:, None], y, 0.0), (M // WIDE, WIDE, BN)), 1) * scale
                y = tl.reshape(tl.broadcast_to(y[:, None, :], (M // WIDE, WIDE, BN)), (M, BN))
                seen = seen & (head == 0)[:, None]
            else:
                y = y * scale
            tl.store(to[:, None] + block[None, :], y, mask=seen)


@triton.jit
def _logits(base, at, high, n, h, units, GROUP: tl.constexpr):
    """Logits [WIDE, BN] of blocks at + n of the query heads, -inf for none."""
    inside = (at + n < high)[None, :] & (h < GROUP)[:, None]
    return tl.load(base + h[:, None].to(tl.int64) * units + (at + n)[None, :], mask=inside, other=float("-inf"))


@triton.jit
def _pooled(x, largest, total, h, GROUP: tl.constexpr):
    """Sum over the query heads of their softmax: scores [BN] of logits [WIDE, BN]."""
    p = tl.exp2((x - largest[:, None]) * LOG2E) / total[:, None]
    return tl.sum(tl.where((h < GROUP)[:, None], p, 0.0), 0)


@triton.jit
def choose(
    logits, seq_of, start_of, stop_of, held, index, used, units, G: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr,
    STARTS: tl.constexpr, SUM: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head): the COUNT highest scores, by keys (score, block), so that later blocks win ties.

    WHOLE: no row has more than BN blocks, which are read once and give their highest one by one. Else a list of the
    highest so far is kept; each chunk of BN blocks gives it blocks until none of them is higher than its lowest.
    WIDTH: the power of two from COUNT on. EARLY: the next kernel may start at once. Other letters as `score` has them.
    """
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    stream = tl.program_id(0).to(tl.int64)
    row = stream // G
    _, low, high = range_of(row, row >= 0, seq_of, start_of, stop_of, held, STARTS)
    n = tl.arange(0, BN)
    h = tl.arange(0, WIDE)
    column = tl.arange(0, WIDTH)
    number = tl.minimum(tl.maximum(high - low, 0), COUNT)
    base = logits + stream * (1 if SUM else GROUP) * units
    keys = tl.where(column < COUNT, NONE + column.to(tl.int64), FULL)
    if WHOLE:
        if SUM:
            s = tl.load(base + low + n, mask=low + n < high, other=0.0)
        else:
            x = _logits(base, low, high, n, h, units, GROUP)
            largest = tl.max(x, 1)
            base_of = tl.where(largest == float("-inf"), 0.0, largest)
            s = _pooled(x, largest, tl.sum(tl.exp2((x - base_of[:, None]) * LOG2E), 1), h, GROUP)
        found = _keys(s, low + n, low + n < high)
        for i in range(0, number):
            best = tl.max(found, 0)
            keys = tl.where(column == i, best, keys)
            found = tl.where(found == best, NONE, found)
    else:
        largest = tl.full((WIDE,), float("-inf"), tl.float32)
        total = tl.zeros((WIDE,), tl.float32)
        if not SUM:
            for at in range(low, high, BN):
                x = _logits(base, at, high, n, h, units, GROUP)
                new = tl.maximum(largest, tl.max(x, 1))
                mean = tl.where(new == float("-inf"), 0.0, new)
                total = total * tl.exp2((largest - mean) * LOG2E) + tl.sum(tl.exp2((x - mean[:, None]) * LOG2E), 1)
                largest = new
        least = tl.min(keys, 0)
        for at in range(low, high, BN):
            if SUM:
                s = tl.load(base + at + n, mask=at + n < high, other=0.0)
            else:
                s = _pooled(_logits(base, at, high, n, h, units, GROUP), largest, total, h, GROUP)
            found = _keys(s, at + n, at + n < high)
            best = tl.max(found, 0)
            while best > least:
                keys = tl.where(keys == least, best, keys)
                found = tl.where(found == best, NONE, found)
                least = tl.min(keys, 0)
                best = tl.max(found, 0)
    # keys of blocks that are not there are the lowest: after them in the order of blocks
    real = (column < COUNT) & (keys >= NONE + WIDTH)
    chosen = tl.sort(tl.where(real, (keys & 0x7FFFFFFF).to(tl.int32), FAR))
    to = index + stream * COUNT + column
    tl.store(to, tl.where(column < number, chosen, 0), mask=column < COUNT)
    tl.store(used + stream, number)


@triton.jit
def score_and_choose(
    q, seq_of, start_of, stop_of, memory, index, used, rows, scale, G: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, T: tl.constexpr, M: tl.constexpr, F: tl.constexpr, F2: tl.constexpr, BN: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, STARTS: tl.constexpr, SUM: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, TABLED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Both steps for many rows, without logits in memory. Program (tile of T rows and KV head).

    It reads the codes twice: for the softmax of each head, then for the scores, of which it keeps each row's highest.
    Letters as `score` and `choose` have them; R rows, T of them in use, with M // R heads each.
    """
    if CHAINED:
        gdc_wait()
    held, table, table_row = memory[4], memory[5], memory[6]
    R: tl.constexpr = M // WIDE
    stream = tl.program_id(0)
    tile, g = stream // G, (stream % G).to(tl.int64)
    m = tl.arange(0, M)
    d = tl.arange(0, F2)
    n = tl.arange(0, BN)
    row = tile * T + m // WIDE
    there = (m < T * WIDE) & (row < rows)
    seq, low, high = range_of(row, there, seq_of, start_of, stop_of, held, STARTS)
    head = m % WIDE
    active = there & (head < GROUP) & (low < high)
    from_q = q[0] + row.to(tl.int64) * q[1] + (g * GROUP + head) * q[2]
    x = tl.load(from_q[:, None] + d[None, :], mask=active[:, None] & (d < F)[None, :], other=0.0)
    r = tl.arange(0, R)
    row_r = tile * T + r
    there_r = (r < T) & (row_r < rows)
    seq_r, low_r, high_r = range_of(row_r, there_r, seq_of, start_of, stop_of, held, STARTS)
    largest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    column = tl.arange(0, WIDTH)
    keys = tl.broadcast_to(tl.where(column < COUNT, NONE + column.to(tl.int64), FULL)[None, :], (R, WIDTH))
    least = tl.min(keys, 1)
    for choosing in tl.static_range(1 if SUM else 0, 2):
        left = active
        while tl.max(left.to(tl.int32), 0) != 0:
            now = tl.min(tl.where(left, seq, FAR), 0)
            mine = left & (seq == now)
            begin = tl.min(tl.where(mine, low, FAR), 0)
            end = tl.max(tl.where(mine, high, 0), 0)
            left = left & (seq != now)
            page = now.to(tl.int64)
            if TABLED and not PAGED:
                page = tl.load(table + page * table_row).to(tl.int64)
            for at in range(begin, end, BN):
                block = at + n
                inside = block < end
                c = _codes(memory, now, page, g, block, inside, d, F, PAGED, PAGE)
                y = tl.dot(x, tl.trans(c), input_precision="ieee")
                seen = mine[:, None] & (block[None, :] >= low[:, None]) & (block[None, :] < high[:, None])
                if choosing == 0:
                    y = tl.where(seen, y * scale, float("-inf"))
                    new = tl.maximum(largest, tl.max(y, 1))
                    mean = tl.where(new == float("-inf"), 0.0, new)
                    total = total * tl.exp2((largest - mean) * LOG2E) + tl.sum(tl.exp2((y - mean[:, None]) * LOG2E), 1)
                    largest = new
                else:
                    if not SUM:
                        y = tl.exp2((y * scale - largest[:, None]) * LOG2E) / total[:, None]
                    s = tl.sum(tl.reshape(tl.where(seen, y, 0.0), (R, WIDE, BN)), 1)
                    if SUM:  # scaled once, so that equal sums of integers stay equal
                        s = s * scale
                    allowed = there_r & (seq_r == now)
                    allowed = allowed[:, None] & (block[None, :] >= low_r[:, None]) & (block[None, :] < high_r[:, None])
                    found = _keys(s, tl.broadcast_to(block[None, :], (R, BN)), allowed)
                    best = tl.max(found, 1)
                    while tl.max((best > least).to(tl.int32), 0) != 0:
                        keys = tl.where((keys == least[:, None]) & (best > least)[:, None], best[:, None], keys)
                        found = tl.where(found == best[:, None], NONE, found)
                        least = tl.min(keys, 1)
                        best = tl.max(found, 1)
    number = tl.minimum(tl.maximum(high_r - low_r, 0), COUNT)
    real = (column < COUNT)[None, :] & (keys >= NONE + WIDTH)
    chosen = tl.sort(tl.where(real, (keys & 0x7FFFFFFF).to(tl.int32), FAR), 1)
    stream_r = row_r.to(tl.int64) * G + g
    to = index + stream_r[:, None] * COUNT + column[None, :]
    kept = tl.where(column[None, :] < number[:, None], chosen, 0)
    tl.store(to, kept, mask=there_r[:, None] & (column < COUNT)[None, :])
    tl.store(used + stream_r, number, mask=there_r)
