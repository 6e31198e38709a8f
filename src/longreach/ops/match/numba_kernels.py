# mypy: ignore-errors
"""The Numba kernels of nearest and match."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from longreach.ops.numba_math import INLINE, KERNEL, to_float


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def _distance(row, mine):
    """Squared L2 of a row of the ring and a query."""
    a = np.float32(0.0)
    for d in range(mine.shape[0]):
        x = to_float(row[d]) - mine[d]
        a += x * x
    return a


@njit(**INLINE)
def _search(query, ring, slot, h, pos, law, mine):
    """(position, squared distance) of the row nearest to a head's query, -1 and inf for none. mine: float32 [D]."""
    rows, stamps, depths = ring
    window, oldest, near, far, deepest, limit, tie = law
    heads, size, dim = depths.shape[1], depths.shape[2], mine.shape[0]
    square = np.float32(0.0)
    for d in range(dim):
        mine[d] = to_float(query[d])
        square += mine[d] * mine[d]
    alike = tie * square
    best, found = np.float32(np.inf), np.int64(-1)
    last = max(pos - min(window, far), max(oldest, 0))
    for at in range(pos - near, last - 1, -1):  # the newest first, which wins ties
        place = at % size
        if stamps[slot, place] != at or depths[slot, h, place] >= deepest:
            continue
        begin = ((slot * heads + h) * size + place) * dim
        distance = _distance(rows[begin : begin + dim], mine)
        if not distance < limit:  # NaN is below nothing
            continue
        distance = np.float32(0.0) if distance <= alike else distance
        if distance < best:
            best, found = distance, at
    return found, best


@njit(**KERNEL)
def nearest(worker, workers, query, shape, ring, slots, positions, law, results):
    """The nearest row of every `workers`-th row and head.

    query: flat [R, H, D]; shape: R, H, D. ring: queries flat [S, H, C, D], stamp int32 [S, C], depth int16 [S, H, C].
    slots, positions: int64 [R]. law: window, oldest, near, far, deepest (all int), limit and tie (float32).
    results, written: distance float32 and position int32 [R, H].
    """
    rows, heads, dim = shape
    distance, position = results
    mine = np.empty(dim, np.float32)
    for item in range(worker, rows * heads, workers):
        r, h = item // heads, item % heads
        at, far = _search(query[item * dim : (item + 1) * dim], ring, slots[r], h, positions[r], law, mine)
        distance[r, h], position[r, h] = far, at


@njit(**KERNEL)
def match(worker, workers, query, shape, ring, credits, slots, positions, law, rule, results):
    """Match, decide and enter into the ring every `workers`-th row and KV head.

    query, ring, slots, positions, law: as in `nearest`; credits: float32 [S, G, C]. The place of the row itself is
    written, which no search of the call reads: the ring is longer than the window.
    rule: band, sinks, min_context, rest (int), price, reuses, patience (float32), bytes of a vector, of a searched
    row and of an entry, the depth that is counted no further, starts of the depth histogram's bins int64.
    results, written: start, read_entry, write_entry int32 [R, H], reads int32 [R, G, 2], notes float32 [R, H, columns].
    """
    count, heads, dim = shape
    rows, stamps, depths = ring
    band, sinks, min_context, rest, price, reuses, patience, row_bytes, entry_bytes, deepest, bins = rule
    window, oldest = law[0], law[1]
    start, read_entry, write_entry, reads, notes = results
    groups, size = credits.shape[1], credits.shape[2]
    group, zero, one = heads // groups, np.float32(0.0), np.float32(1.0)
    mine, found = np.empty(dim, np.float32), np.empty(group, np.int64)
    for item in range(worker, count * groups, workers):
        r, g = item // groups, item % groups
        slot, pos = slots[r], positions[r]
        place, before = pos % size, (pos - 1) % size
        credit = np.float32(np.inf)
        if pos > 0 and stamps[slot, before] == pos - 1:
            credit = credits[slot, g, before]
        long = pos + 1 >= min_context
        on, resting = long and credit >= zero, long and credit < zero
        looked = max(min(pos - oldest, window), 0)
        matched = on and looked > 0
        every = True
        for i in range(group):
            found[i] = -1
            if on:
                begin = (r * heads + g * group + i) * dim
                found[i], _ = _search(query[begin : begin + dim], ring, slot, g * group + i, pos, law, mine)
            every = every and found[i] >= 0

        context = pos + 1
        kept = min(context, sinks)
        first = np.int64(sinks)
        total = zero
        for i in range(group):
            total += np.float32(pos - found[i]) if every else zero
            if every:
                first = found[i] + 1 - band if i == 0 else min(first, found[i] + 1 - band)
        mean, spread = total / np.float32(group), zero
        for i in range(group):
            off = np.float32(pos - found[i]) - mean
            spread += off * off if every else zero
        spread = np.float32(math.sqrt(spread / np.float32(group)))

        gain = np.float32(first - sinks) if every else zero
        cost = max(np.float32(looked) * price, np.float32(1e-9))
        most = max(reuses * np.float32(context - sinks) / cost, patience)
        after = min(min(credit, most) + gain / cost - one, most)
        after = np.float32(-rest) if after < zero else after
        credits[slot, g, place] = after if matched else (credit + one if resting else credit)
        stamps[slot, place] = pos

        stream = max(context - first, 0) + kept
        read = 4 + 4 + (looked * group * row_bytes if matched else 0) + (group * entry_bytes if every else 0)
        reads[r, g, 0], reads[r, g, 1] = stream, read
        wide = np.float32(context)
        for i in range(group):
            h, at = g * group + i, found[i]
            accepted = at >= 0
            begin = at + 1 - band if every else np.int64(sinks)
            depth = 0
            if every:
                depth = min(np.int64(depths[slot, h, at % size]) + 1, deepest)
            entry = (slot * heads + h) * size
            start[r, h] = begin
            read_entry[r, h] = entry + at % size if every else -1
            write_entry[r, h] = entry + place
            depths[slot, h, place] = depth
            source, target = (r * heads + h) * dim, (entry + place) * dim
            for d in range(dim):
                rows[target + d] = query[source + d]
            note = notes[r, h]
            note[0] = one if matched else zero
            note[1] = one if accepted else zero
            note[2] = one if every else zero
            note[3] = np.float32(at + 1 - band - sinks) / wide if accepted else zero
            note[4] = np.float32(begin - sinks) / wide if every else zero
            note[5] = np.float32(pos - at) if accepted else zero
            note[6] = spread
            note[7] = np.float32(max(context - begin, 0) + kept)
            note[8] = np.float32(stream)
            note[9] = one if resting else zero
            for b in range(bins.shape[0]):
                inside = depth >= bins[b] and (b + 1 == bins.shape[0] or depth < bins[b + 1])
                note[10 + b] = one if inside else zero
