# mypy: ignore-errors
"""The Triton kernels of nearest and match.

A program of `look` goes through AGES rows of one ring (one row of the call, one query head), the newest first, and
keeps the nearest: a *piece*. The pieces of a row and KV head are put together by `decide`: in a second kernel, or (with
JOINED) by the program that comes last of those that look for this row and KV head, which saves a launch. What is done
before gdc_wait(): see triton_early.

Letters as in ops/README.md; S sequences of the ring, C its rows, P pieces of a row and head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.match import triton_prefetch as early

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
COLUMNS = tl.constexpr(17)  # NOTES, of which
DEPTH = tl.constexpr(10)  # and after are bins of the depth histogram


@triton.jit
def _looked(pos, window, oldest):
    """Rows that the one at `pos` looks through, if it does."""
    return tl.maximum(tl.minimum(window, pos - oldest), 0)


@triton.jit
def _counted(pos, account, rule, MATCH: tl.constexpr):
    """Rows that the one at `pos` looks through: none below the minimum of context, or while the guard rests."""
    count = _looked(pos, rule[0], rule[1])
    if MATCH:
        count = tl.where((account >= 0) & (pos + 1 >= rule[4]), count, 0)
    return count


@triton.jit
def _signs(slot, pos, h, back, count, ring, H: tl.constexpr, C: tl.constexpr, BOUNDED: tl.constexpr):
    """Stamps, and depths (0 unless BOUNDED), of the rows `back` from the one before `pos`; a stamp of -1 from `count`
    on."""
    _, stamp, depth, _, _ = ring
    there = back < count
    place = early.places(pos, back, C)
    held = tl.load(stamp + slot * C + place, mask=there, other=-1, cache_modifier=".cg")
    deep = tl.zeros_like(held)
    if BOUNDED:
        at = depth + (slot * H + h) * C + place
        deep = tl.load(at, mask=there, other=0, cache_modifier=".cg").to(tl.int32)
    return held, deep


@triton.jit
def _queries(slot, pos, h, back, count, query, d, H: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Those [BK, BD] of the rows `back` from the one before `pos`, 0 from `count` on."""
    place = early.places(pos, tl.where(back < count, back, 0), C)[:, None]
    if C * D >= 1 << 31:
        place = place.to(tl.int64)
    there = (back < count)[:, None] & (d < D)[None, :]
    return tl.load(query + (slot * H + h) * C * D + place * D + d[None, :], mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _apart(x, q):
    """Squared distances [BK]."""
    apart = x.to(tl.float32) - q[None, :]
    return tl.sum(apart * apart, 1)


@triton.jit
def _key(distance, p):
    """Of a distance >= 0 and a position >= -1, what is least for the nearest, and among equals for the newest."""
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - p.to(tl.int64))


@triton.jit
def _distance_and_position(key):
    return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True), (0x7FFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _query(
    row, h, rows, turn, weight, to, d, D: tl.constexpr, P2: tl.constexpr, HALVES: tl.constexpr, WEIGHTED: tl.constexpr
):
    """The query of a row and head as it is matched, rounded to the dtype of pointer `to`: fp32 [BD]."""
    q, q_row, q_head, _, _ = rows
    inside = d < D
    at = q + row.to(tl.int64) * q_row + h * q_head
    x = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
    if P2 > 0:  # channels that turn
        cos, cos_row, cos_pair, sin, sin_row, sin_pair = turn
        turned = d < P2
        if HALVES:
            first = d < P2 // 2
            partner = tl.where(first, d + P2 // 2, d - P2 // 2)
            pair = tl.where(first, d, d - P2 // 2)
        else:
            first = d % 2 == 0
            partner = tl.where(first, d + 1, d - 1)
            pair = d // 2
        other = tl.load(at + partner, mask=turned, other=0.0).to(tl.float32)
        c = tl.load(cos + row.to(tl.int64) * cos_row + pair * cos_pair, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + row.to(tl.int64) * sin_row + pair * sin_pair, mask=turned, other=0.0).to(tl.float32)
        x = tl.where(turned, (x * c + tl.where(first, other, -other) * s) / (c * c + s * s), x)
        x = x.to(to.dtype.element_ty).to(tl.float32)
    if WEIGHTED:
        x = x * tl.load(weight + h * D + d, mask=inside, other=0.0).to(tl.float32)
        x = x.to(to.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def search(
    rows, slots, sizes, ring, turn, weight, pieces, result, rule,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HG: tl.constexpr,
    P: tl.constexpr, P2: tl.constexpr, PP: tl.constexpr, AGES: tl.constexpr, AGES2: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, HALVES: tl.constexpr, WEIGHTED: tl.constexpr, BOUNDED: tl.constexpr, MATCH: tl.constexpr,
    JOINED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The nearest of rows [piece * AGES, (piece + 1) * AGES) back from each row, head by head.

    rows: (q, row stride, head stride, seq, pos); sizes: (length of slots, S); ring: (query, stamp, depth, credit,
    arrivals); turn: (cos, row and pair stride, sin, row and pair stride), P2 channels of it; pieces: (nearest [R, H, P]
    as `_key` puts it, room for AGES distances a program where it reads its rows block after block);
    rule: (window, oldest, band, sinks, minimum, near, far, deepest, limit, patience, rest, price, reuses, tie).
    MATCH: `match`, else `nearest`, whose rows give the ring's sequences as seq. result: see `decide`.
    AGES2, PP, HG: powers of two that AGES, P, and the query heads of a KV head fit in. BOUNDED: whether depths are.
    """
    query, _, depth, _, arrivals = ring
    near, far, deepest = rule[5], rule[6], rule[7]
    program = tl.program_id(0)
    GROUP: tl.constexpr = H // G
    ONCE: tl.constexpr = AGES == BK  # all of its rows are under way at once: then they are asked for where the guess is
    piece = program % P
    h = program // P % H
    g = h // GROUP
    row = program // (P * H)
    first = piece * AGES
    d = tl.arange(0, BD)
    k = tl.arange(0, BK)
    account, guess, right = 0.0, 0, False
    seq, slot, pos = tl.zeros((), tl.int64), tl.zeros((), tl.int64), 0
    if CHAINED:
        seq, slot, pos = early.guessed(row, rows, slots, sizes, MATCH)
        if MATCH:
            account = early.account(pos, slot, g, ring, C, G)
        guess = _counted(pos, account, rule, MATCH)
        early.fetch(slot, pos, h, first, guess, ring, H, G, C, D, BK if ONCE else 2 * BK, BOUNDED)
        gdc_wait()
    if ONCE:
        back = first + k
        x = _queries(slot, pos, h, back, guess, query, d, H, C, D)
        held, deep = _signs(slot, pos, h, back, guess, ring, H, C, BOUNDED)
        if CHAINED:
            if MATCH:
                account = early.account(pos, slot, g, ring, C, G)
            right = early.confirmed(seq, slot, pos, row, rows, slots, MATCH)
            right = right & (_counted(pos, account, rule, MATCH) <= guess)
        q = _query(row, h, rows, turn, weight, query, d, D, P2, HALVES, WEIGHTED)
        alike = rule[13] * tl.sum(q * q)  # rows of the ring are on their way meanwhile
        if not right:
            slot, pos = early.known(row, rows, slots, MATCH)
            if MATCH:
                account = early.account(pos, slot, g, ring, C, G)
            count = _counted(pos, account, rule, MATCH)
            x = _queries(slot, pos, h, back, count, query, d, H, C, D)
            held, deep = _signs(slot, pos, h, back, count, ring, H, C, BOUNDED)
        count = _counted(pos, account, rule, MATCH)
        distance = _apart(x, q)
    else:
        slot, pos = early.known(row, rows, slots, MATCH)
        if MATCH:
            account = early.account(pos, slot, g, ring, C, G)
        count = tl.minimum(_counted(pos, account, rule, MATCH), first + AGES)
        back = first + tl.arange(0, AGES2)
        held, deep = _signs(slot, pos, h, back, count, ring, H, C, BOUNDED)
        q = _query(row, h, rows, turn, weight, query, d, D, P2, HALVES, WEIGHTED)
        alike = rule[13] * tl.sum(q * q)
        mine = pieces[1] + program.to(tl.int64) * AGES
        for age in tl.range(0, count - first, BK, num_stages=STAGES):
            x = _queries(slot, pos, h, first + age + k, count, query, d, H, C, D)
            tl.store(mine + age + k, _apart(x, q))
        tl.debug_barrier()  # what its other threads wrote
        distance = tl.load(mine + back - first, mask=back < count, other=0.0, cache_modifier=".cg")
    if MATCH:
        if piece == 0:
            own = query + ((slot * H + h) * C + pos % C) * D
            tl.store(own + d, q.to(query.dtype.element_ty), mask=d < D)

    last = (piece == 0) & (h % GROUP == 0)  # who settles where nothing is looked at, as all programs know
    if (not MATCH) | (_counted(pos, account, rule, MATCH) > 0):
        p = pos - 1 - back
        ok = (held == p) & (back + 1 >= near) & (back < tl.minimum(count, far))
        if BOUNDED:
            ok = ok & (deep < deepest)
        ok = ok & (distance < (rule[8] if MATCH else float("inf")))  # NaN is not
        distance = tl.where(distance <= alike, 0.0, distance)
        key = tl.min(_key(tl.where(ok, distance, float("inf")), tl.where(ok, p, -1)), 0)
        tl.store(pieces[0] + (row * H + h) * P + piece, key)
        if JOINED:
            if CHAINED and not BOUNDED:  # else it has been read just now
                least, found = _distance_and_position(key + tl.zeros((1,), tl.int64))
                early.fetch_lines(depth + (slot * H + h) * C + tl.maximum(found, 0) % C, found >= 0)
            tl.debug_barrier()  # this program's piece is written before it says so
            done = tl.atomic_add(arrivals + slot * G + g, 1, sem="acq_rel")
            last = done == GROUP * P - 1
            if last:
                tl.store(arrivals + slot * G + g, 0)
    if CHAINED:  # not before: attention comes next
        gdc_launch_dependents()
    if JOINED:
        if last:
            _settle(row, g, slot, pos, account, ring, pieces, result, rule, H, G, C, D, HG, P, PP, BOUNDED, MATCH)


@triton.jit
def decide(
    rows, slots, sizes, ring, pieces, result, rule,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, HG: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, BOUNDED: tl.constexpr, MATCH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """What comes of the pieces of one row and KV head. Arguments as in `look`; result: (start, take, put, reads, notes)
    of `match`, or (distance, position) of `nearest`."""
    row = tl.program_id(0) // G
    g = tl.program_id(0) % G
    # no guesses: `look` came before, it has waited for all before itself, and it writes pieces and queries alone
    _, slot, pos = early.guessed(row, rows, slots, sizes, MATCH)
    account = 0.0
    if MATCH:
        account = early.account(pos, slot, g, ring, C, G)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    _settle(row, g, slot, pos, account, ring, pieces, result, rule, H, G, C, D, HG, P, PP, BOUNDED, MATCH)


@triton.jit
def _column(notes, number: tl.constexpr, value, at):
    return tl.where(at == number, value, notes)


@triton.jit
def _settle(
    row, g, slot, pos, account, ring, pieces, result, rule,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, HG: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, BOUNDED: tl.constexpr, MATCH: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = H // G
    i = tl.arange(0, HG)
    head = g * GROUP + i
    mine = i < GROUP
    n = tl.arange(0, PP)
    at = (row * H + head[:, None]) * P + n[None, :]
    there = mine[:, None] & (n < P)[None, :]
    if MATCH:  # who looks at nothing leaves no pieces
        there = there & (_counted(pos, account, rule, MATCH) > 0)
    keys = tl.load(pieces[0] + at, mask=there, other=0x7FFFFFFFFFFFFFFF, cache_modifier=".cg")
    distance, p = _distance_and_position(tl.min(keys, 1))
    if not MATCH:
        tl.store(result[0] + row * H + head, distance, mask=mine)
        tl.store(result[1] + row * H + head, p, mask=mine)
    else:
        query, stamp, depth, credit, _ = ring
        window, oldest, band, sinks, minimum, _, _, deepest, _, patience, rest, price, reuses, _ = rule
        start_of, take_of, put_of, reads_of, notes_of = result
        long = pos + 1 >= minimum
        count = _looked(pos, window, oldest)
        matched = long & (account >= 0) & (count > 0)
        resting = long & (account < 0)
        accepted = (p >= 0) & mine
        every = tl.sum((accepted | (i >= GROUP)).to(tl.int32), 0) == HG
        reused = accepted & every
        place = pos % C
        before = tl.where(p >= 0, p, 0) % C
        memory = (slot * H + head) * C
        start = tl.where(reused, p + 1 - band, sinks)  # p >= oldest: above the sinks
        first = tl.min(tl.where(mine, start, 1 << 30), 0)
        old = tl.load(depth + memory + before, mask=reused, other=0).to(tl.int32)
        deep = tl.where(reused, tl.minimum(old + 1, 32767), 0)
        tl.store(depth + memory + place, deep.to(tl.int16), mask=mine)
        tl.store(start_of + row * H + head, start, mask=mine)
        tl.store(take_of + row * H + head, tl.where(reused, memory + before, -1).to(tl.int32), mask=mine)
        tl.store(put_of + row * H + head, (memory + place).to(tl.int32), mask=mine)
        if g == 0:
            tl.store(stamp + slot * C + place, pos)

        saved = tl.where(every, first - sinks, 0).to(tl.float32)
        cost = tl.maximum(count.to(tl.float32) * price, 1e-9)
        most = tl.maximum(reuses * (pos + 1 - sinks).to(tl.float32) / cost, patience)
        after = tl.minimum(tl.minimum(account, most) + (saved / cost - 1), most)
        after = tl.where(after < 0, -rest, after)
        after = tl.where(matched, after, tl.where(resting, account + 1, account))
        tl.store(credit + (slot * G + g) * C + place, after)

        context = pos + 1
        kept = tl.minimum(context, sinks)
        stream = tl.maximum(context - first, 0) + kept
        WIDE: tl.constexpr = credit.dtype.element_ty.primitive_bitwidth // 8
        VECTOR: tl.constexpr = D * (query.dtype.element_ty.primitive_bitwidth // 8)
        each = VECTOR + 4 + (2 if BOUNDED else 0)
        read = tl.where(matched, count * GROUP * each, 0) + 4 + WIDE
        read += tl.where(every, GROUP * ((D + 1) * WIDE + 2), 0)
        tl.store(reads_of + (row * G + g) * 2, stream)
        tl.store(reads_of + (row * G + g) * 2 + 1, read)

        share = tl.where(accepted, p + 1 - band - sinks, 0).to(tl.float32) / context.to(tl.float32)
        gap = tl.where(accepted, pos - p, 0).to(tl.float32)
        mean = tl.sum(gap, 0) / GROUP
        spread = tl.sqrt(tl.sum(tl.where(mine, (gap - mean) * (gap - mean), 0.0), 0) / GROUP)
        column = tl.arange(0, 32)[None, :]
        notes = tl.zeros((HG, 32), tl.float32)
        notes = _column(notes, 0, matched.to(tl.float32), column)
        notes = _column(notes, 1, accepted.to(tl.float32)[:, None], column)
        notes = _column(notes, 2, reused.to(tl.float32)[:, None], column)
        notes = _column(notes, 3, share[:, None], column)
        skipped = tl.where(reused, start - sinks, 0).to(tl.float32) / context.to(tl.float32)
        notes = _column(notes, 4, skipped[:, None], column)
        notes = _column(notes, 5, gap[:, None], column)
        notes = _column(notes, 6, tl.where(every, spread, 0.0), column)
        keys = (tl.maximum(context - start, 0) + kept).to(tl.float32)
        notes = _column(notes, 7, keys[:, None], column)
        notes = _column(notes, 8, stream.to(tl.float32), column)
        notes = _column(notes, 9, resting.to(tl.float32), column)
        j = tl.maximum(column - DEPTH, 0)  # bins of the depth histogram: 0, 1, 2 to 3, 4 to 7, ..., all the rest
        low = tl.where(j == 0, 0, (1 << j) >> 1)
        high = tl.where(j == COLUMNS - DEPTH - 1, 1 << 30, 1 << j)
        inside = (deep[:, None] >= low) & (deep[:, None] < high)
        notes = tl.where(column >= DEPTH, inside.to(tl.float32), notes)
        place_of = notes_of + (row * H + head[:, None]) * COLUMNS + column
        tl.store(place_of, notes, mask=mine[:, None] & (column < COLUMNS))
