# mypy: ignore-errors
"""The Triton kernels of top_k: a bracket from a sample, one read of the scores, the rest among few candidates.

`bracket` reads a stratified sample of each row and finds two values that the k-th largest lies between, but for about
one row in 10,000. `classify` reads the scores once: what lies above the bracket gets its bit in a plane of one bit a
column, what lies inside goes to a list of candidates. `resolve` finds the k-th value among the candidates and sets the
bits of those chosen. `write` turns bits into ascending columns. All decisions are made on the device; the order in
which candidates arrive changes no result.

Ties: where many samples share a value at an end of the bracket (rows of zeros), `classify` marks the columns that hold
that value in a second plane instead of listing them, and `write` takes as many as are wanted, lowest columns first.

Where the bracket misses, or holds more candidates than there is room for, `resolve` searches the whole row by itself:
at most 16 reads of the row by one program, each of which cuts the range of keys to a quarter (about 10 us a read of
131,072 columns, 0.1 to 0.2 ms in all, side by side for as many rows as programs fit).

Measured on an H200, the parts by themselves, in us. 256 rows of 131,072 columns, k = 13,107: bracket 35, classify 47
(134 MB, which take 32 by themselves), resolve 25, write 18; together, as they overlap, 117. 8 rows: 10, 4, 13 and 2;
together 27. Rows of up to 8,192 columns: `short`, one program a row that holds it in registers; 512 rows: 53.

`bracket`: triton_sample; keys, and how they are searched: triton_keys; rows that one program holds: triton_short.
Values are compared as floats where that says the same as their keys. Columns are int32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.top_k import triton_keys as keys
from longreach.ops.top_k.triton_keys import CAPACITY, COLUMNS, LEAST, OVER, UNDER
from longreach.ops.top_k.triton_sample import HIGH, KIND, LOW, MARKS, SEARCHED, TAKE, TIED

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
NO_TIES, HIGH_TIES, LOW_TIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _ones(x):
    """Set bits of int32 words."""
    if INTERPRETED:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x = (x + (x >> 8)) & 0x00FF00FF
        y = (x + (x >> 16)) & 0x3F
    else:
        y = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    return y


@triton.constexpr_function
def _bit(i):
    """Bit i as an int32."""
    return 1 << i if i < 31 else -(1 << 31)


@triton.jit
def _before(column, u):
    """Word u of a plane in which all columns before `column` are set."""
    n = tl.minimum(tl.maximum(column - 32 * u, 0), 32)
    return tl.where(n == 32, -1, (1 << tl.minimum(n, 31)) - 1)


@triton.jit
def _four(x, W: tl.constexpr):
    """Four tensors [W], the i-th of which holds x[4 w + i]: what a thread has read at once."""
    even, odd = tl.split(tl.reshape(x, [W, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _slots(x, start, end, W: tl.constexpr):
    """The scores of a block of 32 W columns, anything from `end` on, as 32 tensors [W], read in vectors.

    Slot 4 r + i of word w is column 4 W r + 4 w + i, r < 8, i < 4: a thread has all slots of its words.
    """
    quad = tl.arange(0, 4 * W)
    slots = ()
    for r in tl.static_range(8):
        column = start + 4 * W * r + quad
        slots = slots + _four(tl.load(x + column, mask=column < end).to(tl.float32), W)
    return slots


@triton.jit
def _reach(slots, bound, W: tl.constexpr):
    """The slots whose scores are at least `bound`, as bits."""
    bits = tl.zeros([W], tl.int32)
    for e in tl.static_range(32):
        bits |= tl.where(slots[e] >= bound, _bit(e), 0)
    return bits


@triton.jit
def _inside(column, first, stop, W: tl.constexpr):
    """The slots whose columns lie in [first, stop), as bits; column [W]: that of slot 0."""
    bits = tl.zeros([W], tl.int32)
    for e in tl.static_range(32):
        at = column + (e // 4 * (4 * W) + e % 4)
        bits |= tl.where((at >= first) & (at < stop), _bit(e), 0)
    return bits


@triton.jit
def _in_order(bits, W: tl.constexpr):
    """Words of 32 slots as words of 32 columns."""
    even = tl.join(tl.join(bits, bits >> 16), tl.join(bits >> 8, bits >> 24))
    odd = tl.join(tl.join(bits >> 4, bits >> 20), tl.join(bits >> 12, bits >> 28))
    fours = tl.reshape(tl.permute(tl.join(even, odd), (1, 2, 3, 0)), [W, 8]) & 15
    return tl.sum(fours << (4 * tl.arange(0, 8))[None, :], 1)


@triton.jit
def classify(given, space, blocks, C: tl.constexpr, W: tl.constexpr, QUADS: tl.constexpr, CHAINED: tl.constexpr):
    """One block of 32 W columns of one row: the bits of what is surely chosen or tied, and the list of candidates.

    C: room for candidates a row. QUADS: the number of columns is a multiple of 4.
    """
    marks, counter, tally, planes, found, _ = space
    row = tl.program_id(0)
    start = tl.program_id(1) * (32 * W)
    x, length, _, first, stop, busy = keys.row_of(row, given)
    columns = given[COLUMNS]
    if QUADS:  # says that whole vectors are inside or outside
        columns = columns // 4 * 4
    there = busy & (start < length)
    # scores are older than the kernel before, which has waited for whoever made them
    slots = _slots(x, start, tl.where(there, columns, 0), W)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if there:
        row_marks = marks + row.to(tl.int64) * MARKS
        high_key, low_key, tied = tl.load(row_marks + HIGH), tl.load(row_marks + LOW), tl.load(row_marks + TIED)
        high, low, under = keys.value_of(high_key), keys.value_of(low_key), keys.value_of(low_key - 1)
        w = tl.arange(0, W)
        above, listed = _reach(slots, high, W), _reach(slots, low, W)
        listed &= ~above
        edge = (start < first) | (start + 32 * W > stop)
        if edge:
            inside = _inside(start + 4 * w, first, stop, W)
            above &= inside
            listed &= inside
        mine = _ones(listed)
        both = tl.sum(mine + (_ones(above) << 16), 0)
        # a place for candidates: asked for now, needed later
        place = tl.atomic_add(counter + row + 0 * w, tl.where(w == 0, both & 0xFFFF, 0), mask=w == 0, sem="relaxed")
        sure = _in_order(above, W)
        u = start // 32 + w
        forced = 0
        if edge:
            end = start + 32 * W
            forced = tl.maximum(tl.minimum(first, end) - start, 0)
            forced += tl.maximum(tl.minimum(length, end) - tl.maximum(stop, start), 0)
            sure |= _before(length, u) & ~(_before(stop, u) & ~_before(first, u))
        plane = planes + row.to(tl.int64) * 2 * blocks * W + u
        tl.store(plane, sure)
        row_tally = tally + row.to(tl.int64) * 3 * blocks + tl.program_id(1)
        if tied != 0:
            again = _slots(x, start, columns, W)
            tie = tl.zeros([W], tl.int32)
            for e in tl.static_range(32):
                tie |= tl.where((again[e] == high) | ((again[e] == under) & ~(again[e] >= low)), _bit(e), 0)
            if edge:
                tie &= _inside(start + 4 * w, first, stop, W)
            tl.store(plane + blocks * W, _in_order(tie, W))
            highs = tl.sum(_ones(tie & above), 0)
            forced -= highs
            tl.store(row_tally + blocks, highs)
            tl.store(row_tally + 2 * blocks, tl.sum(_ones(tie & ~above), 0))
        tl.store(row_tally, (both >> 16) + forced)
        most = tl.max(mine, 0)
        to = found + row.to(tl.int64) * C + (tl.cumsum(mine, 0) - mine)
        place = tl.sum(tl.where(w == 0, place, 0), 0)
        if place + (both & 0xFFFF) <= C:
            to += place
            for _ in range(most):
                lowest = listed & -listed
                slot = _ones(lowest - 1)
                at = start + (slot >> 2) * (4 * W) + 4 * w + (slot & 3)
                value = tl.load(x + at, mask=listed != 0).to(tl.float32)
                entry = (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | at.to(tl.uint32).to(tl.int64)
                tl.store(to, entry, mask=listed != 0)
                listed ^= lowest
                to += 1


@triton.jit
def _entries(at, entries, M, NB: tl.constexpr):
    """Candidates at, at + 1, .. of M: keys, LEAST past the last, and columns."""
    n = at + tl.arange(0, NB)
    entry = tl.load(entries + n, mask=n < M, other=0)
    key = keys.key_of((entry >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    return tl.where(n < M, key, LEAST), entry.to(tl.int32)


@triton.jit
def _ranked(key, column, kth, TIES: tl.constexpr):
    """What candidates are ranked by: their keys; or, of those tied at the key kth, low columns first."""
    if TIES:
        key = tl.where(key == kth, -1 - column, LEAST)
    return key


@triton.jit
def _kth(rank, a, b, from_a, from_b, key, column, entries, M, kth, TIES: tl.constexpr, NB: tl.constexpr):
    """The key of that rank in [a, b), or one whose reach is the same; how many reach it and what lies above.

    key, column [NB]: the first NB of M candidates, which stay where they are; the rest is read again in every round.
    """
    held = _ranked(key, column, kth, TIES)
    even = from_a > from_b
    while (b - a != 1) & (from_a != rank):
        one, two = keys.around(rank, a, b, from_a, from_b, even)
        from_one, from_two = keys.reaching(held, one, two)
        for at in range(NB, M, NB):
            more, columns = _entries(at, entries, M, NB)
            ones, twos = keys.reaching(_ranked(more, columns, kth, TIES), one, two)
            from_one += ones
            from_two += twos
        a, b, from_a, from_b, even = keys.narrow(rank, a, b, from_a, from_b, one, two, from_one, from_two)
    return a, from_a, from_b


@triton.jit
def _mark(key, column, kth, cut, plane):
    """Set the bits of candidates above the key kth, and at it before column `cut`. No candidate: key LEAST."""
    chosen = (key > kth) | ((key == kth) & (column < cut))
    tl.atomic_or(plane + (column >> 5), 1 << (column & 31), mask=chosen & (key != LEAST), sem="relaxed")


@triton.jit
def _choose(pick, M, low, high, columns, entries, plane, NB: tl.constexpr, PART: tl.constexpr):
    """Set the bits of the `pick` largest of M candidates, whose keys are in [low, high); ties to the lower column.

    NB candidates are held, the others looked at PART at a time once it is known which to take.
    """
    none = tl.full((), 0, tl.int32)
    key, column = _entries(0, entries, M, NB)
    kth, from_kth, above = _kth(pick, low, high, M, none, key, column, entries, M, low, False, NB)
    cut = columns  # of the candidates with that very key, if not all: those before this column
    if from_kth != pick:
        last, _, _ = _kth(
            pick - above, -columns, none, from_kth - above, none, key, column, entries, M, kth, True, NB
        )  # fmt: skip
        cut = -last
    _mark(key, column, kth, cut, plane)
    for at in range(NB, M, PART):
        more, its_column = _entries(at, entries, M, PART)
        _mark(more, its_column, kth, cut, plane)


@triton.jit
def _at_least(v, key, NB: tl.constexpr):
    """How many of NB values reach a key that is not NaN's, as partial sums [NB / 4]."""
    bound = keys.value_of(tl.maximum(key, UNDER).to(tl.int32))
    return tl.sum(tl.reshape((v >= bound).to(tl.int32), [4, NB // 4]), 0)


@triton.jit
def _search(rank, x, first, stop, length, plane, plane_size, NB: tl.constexpr):
    """Planes of a row from nothing but its scores: what reaches the key of that rank in the middle, and its ties.

    Returns how many of the ties to take.
    """
    a, b = tl.full((), LEAST, tl.int64), tl.full((), OVER, tl.int64)
    from_a, from_b = stop - first, 0
    n = tl.arange(0, NB)
    while (b - a > 1) & (from_a != rank):
        one, two, three = a + tl.maximum((b - a) >> 2, 1), (a + b) >> 1, a + ((3 * (b - a)) >> 2)
        ones, twos, threes = tl.zeros([NB // 4], tl.int32), tl.zeros([NB // 4], tl.int32), tl.zeros([NB // 4], tl.int32)
        for at in range(first, stop, NB):
            v = tl.load(x + at + n, mask=at + n < stop, other=float("nan")).to(tl.float32)
            ones += _at_least(v, one, NB)
            twos += _at_least(v, two, NB)
            threes += _at_least(v, three, NB)
        from_one, from_two, from_three = tl.sum(ones, 0), tl.sum(twos, 0), tl.sum(threes, 0)
        if from_three >= rank:
            a, from_a = three, from_three
        elif from_two >= rank:
            a, from_a, b, from_b = two, from_two, three, from_three
        elif from_one >= rank:
            a, from_a, b, from_b = one, from_one, two, from_two
        else:
            b, from_b = one, from_one
    kth = a.to(tl.int32)
    bit = tl.arange(0, 32)[None, :]
    word = tl.arange(0, NB // 32)
    for at in range(0, tl.cdiv(length, 32), NB // 32):
        u = at + word
        column = 32 * u[:, None] + bit
        inside = (column >= first) & (column < stop)
        key = keys.key_of(tl.load(x + column, mask=inside, other=float("nan")).to(tl.float32))
        sure = tl.sum(tl.where(inside & (key >= kth), 1 << bit, 0), 1)
        tie = tl.sum(tl.where(inside & (key == kth), 1 << bit, 0), 1)
        outside = _before(length, u) & ~(_before(stop, u) & ~_before(first, u))
        tl.store(plane + u, sure | outside, mask=32 * u < length)
        tl.store(plane + plane_size + u, tie, mask=32 * u < length)
    return tl.where(from_a == rank, length, rank - from_b)


@triton.jit
def _split(one, two, kind):
    """Bits chosen whatever the ties, bits tied: from bits that are sure or tied high, and bits that are tied."""
    two = tl.where(kind == NO_TIES, 0, two)
    return tl.where(kind == HIGH_TIES, one & ~two, one), tl.where(kind == HIGH_TIES, one & two, two & ~one)


@triton.jit
def _count_ahead(plane, plane_size, length, kind, ahead, parts, PW: tl.constexpr, PARTS: tl.constexpr):
    """How many bits lie before each part of PW words: chosen ones, tied ones << 32."""
    part = tl.arange(0, PARTS)
    before = tl.full((), 0, tl.int64)
    for at in range(0, parts, PARTS):
        u = (at + part)[:, None] * PW + tl.arange(0, PW)[None, :]
        there = 32 * u < length
        one = tl.load(plane + u, mask=there, other=0, cache_modifier=".cg")  # not what was read before bits were set
        two = tl.load(plane + plane_size + u, mask=there & (kind != NO_TIES), other=0, cache_modifier=".cg")
        sure, tie = _split(one, two, kind)
        both = tl.sum(_ones(sure) + (_ones(tie) << 16), 1)
        both = (both & 0xFFFF).to(tl.int64) + ((both >> 16).to(tl.int64) << 32)
        tl.store(ahead + at + part, before + tl.cumsum(both, 0) - both, mask=at + part < parts)
        before += tl.sum(both, 0)


@triton.jit
def resolve(
    given, space, blocks, C: tl.constexpr, W: tl.constexpr, NB: tl.constexpr, SEARCH: tl.constexpr, B: tl.constexpr,
    PW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Which candidates and ties of a row are chosen, and how many lie before each part of PW words.

    NB: candidates held at a time; SEARCH: columns that the slow path reads at a time; B: at least `blocks`.
    """
    marks, counter, tally, planes, found, ahead = space
    row = tl.program_id(0)
    x, length, k, first, stop, busy = keys.row_of(row, given)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if busy:
        row_marks = marks + row.to(tl.int64) * MARKS
        plane = planes + row.to(tl.int64) * 2 * blocks * W
        block = tl.arange(0, B)
        row_tally = tally + row.to(tl.int64) * 3 * blocks + block
        filled = block < tl.cdiv(length, 32 * W)
        M = tl.load(counter + row)
        want = k - tl.sum(tl.load(row_tally, mask=filled, other=0), 0)  # beside what is surely chosen
        pick, kind, take = want, tl.full((), NO_TIES, tl.int32), tl.full((), 0, tl.int32)
        good = (want >= 0) & (want <= M)
        if tl.load(row_marks + TIED) != 0:
            highs = tl.sum(tl.load(row_tally + blocks, mask=filled, other=0), 0)
            lows = tl.sum(tl.load(row_tally + 2 * blocks, mask=filled, other=0), 0)
            rest = want - highs
            kind = tl.where(rest <= 0, HIGH_TIES, LOW_TIES)
            pick = tl.minimum(tl.maximum(rest, 0), M)
            take = tl.where(rest <= 0, want, rest - pick)
            good = (want >= 0) & (rest - pick <= lows)
        good = good & ((pick == 0) | (M <= C))
        if good:
            if pick > 0:
                low, high = tl.load(row_marks + LOW), tl.load(row_marks + HIGH)
                _choose(pick, M, low, high, length, found + row.to(tl.int64) * C, plane, NB, NB // 4)
        else:
            kind = tl.full((), HIGH_TIES, tl.int32)
            take = _search(k - first - (length - stop), x, first, stop, length, plane, blocks * W, SEARCH)
        tl.store(row_marks + KIND, kind)
        tl.store(row_marks + TAKE, take)
        tl.store(row_marks + SEARCHED, 1 - good.to(tl.int32))
        tl.debug_barrier()  # the bits are set by all threads
        parts = tl.cdiv(blocks * W, PW)
        _count_ahead(plane, blocks * W, length, kind, ahead + row.to(tl.int64) * parts, parts, PW, max(1, 4096 // PW))


@triton.jit
def write(
    given, space, index, plane_size, PW: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The chosen columns among PW words of a row, ascending, behind those of all words before.

    A thread has one piece of BITS columns at a time, T of them at once: neighbours write to neighbouring places.
    EARLY: the next kernel, attention perhaps, may start at once, else when this one is done.
    """
    marks, planes, ahead = space[0], space[3], space[5]
    row = tl.program_id(0)
    start = tl.program_id(1) * (PW * 32 // BITS)
    _, length, k, _, _, busy = keys.row_of(row, given)
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    # read before it is known whether that is of use; what is past the length holds anything, and its places are past k
    pieces = (planes + row.to(tl.int64) * 2 * plane_size).to(tl.pointer_type(tl.int16 if BITS == 16 else tl.int8))
    size = plane_size * (32 // BITS)
    mask = (1 << BITS) - 1
    n = start + tl.arange(0, T)
    one = tl.load(pieces + n, mask=n < size, other=0).to(tl.int32) & mask
    kind = tl.load(marks + row.to(tl.int64) * MARKS + KIND)
    take = tl.load(marks + row.to(tl.int64) * MARKS + TAKE)
    before = tl.load(ahead + row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1))
    if busy & (BITS * start < length):
        ties_before = (before >> 32).to(tl.int32)
        done = (before & 0x7FFFFFFF).to(tl.int32) + tl.minimum(ties_before, take)
        to = index + row.to(tl.int64) * given[CAPACITY]
        for at in range(0, PW * 32 // BITS, T):
            n = start + at + tl.arange(0, T)
            following = tl.load(pieces + n + T, mask=(n + T < size) & (at + T < PW * 32 // BITS), other=0)
            chosen = one
            if kind != NO_TIES:
                two = tl.load(pieces + size + n, mask=n < size, other=0).to(tl.int32) & mask
                chosen, tie = _split(one, two, kind)
                each = _ones(tie)
                left = take - ties_before - (tl.cumsum(each, 0) - each)  # ties still wanted, this piece's first ones
                ties_before += tl.sum(each, 0)
                for i in range(tl.max(tl.minimum(left, each), 0)):
                    lowest = tie & -tie
                    chosen |= tl.where(i < left, lowest, 0)
                    tie ^= lowest
            mine = _ones(chosen)
            place = done + tl.cumsum(mine, 0) - mine
            done += tl.sum(mine, 0)
            for _ in range(tl.max(mine, 0)):
                lowest = chosen & -chosen
                tl.store(to + place, BITS * n + _ones(lowest - 1), mask=(chosen != 0) & (place < k))
                chosen ^= lowest
                place += 1
            one = following.to(tl.int32) & mask
    if CHAINED and not EARLY:
        gdc_launch_dependents()
