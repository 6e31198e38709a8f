# mypy: ignore-errors
"""What `look` does while the kernel before it may still write: it guesses what it will need, and has it brought closer.

What is read before gdc_wait() is stale if a kernel that still runs is to write it: the one before, whichever that was,
or (if that is append, the only one here that lets the next start before it has waited itself) one before that. Such a
value may be anything. It is a *guess*, kept inside of memory, by which rows are brought into L2, and it is asked for
again after the wait; a wrong one costs time and nothing else. Loads bypass L1, where what a guess has read could
outlive the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def guessed(row, rows, slots, sizes, MATCH: tl.constexpr):
    """(index of slots, the ring's sequence, position) of a row, each inside of memory whatever was read."""
    known, sequences = sizes
    seq = tl.load(rows[3] + row, cache_modifier=".cg").to(tl.int64)
    pos = tl.load(rows[4] + row, cache_modifier=".cg").to(tl.int32)
    slot = seq
    if MATCH:
        seq = tl.minimum(tl.maximum(seq, 0), known - 1)
        slot = tl.load(slots + seq, cache_modifier=".cg").to(tl.int64)
    return seq, tl.minimum(tl.maximum(slot, 0), sequences - 1), tl.maximum(pos, 0)


@triton.jit
def confirmed(seq, slot, pos, row, rows, slots, MATCH: tl.constexpr):
    """Whether a guess was right. Its loads do not wait for one another."""
    right = tl.load(rows[4] + row, volatile=True).to(tl.int32) == pos
    if MATCH:
        right = right & (tl.load(rows[3] + row, volatile=True).to(tl.int64) == seq)
        right = right & (tl.load(slots + seq, volatile=True).to(tl.int64) == slot)
    else:
        right = right & (tl.load(rows[3] + row, volatile=True).to(tl.int64) == slot)
    return right


@triton.jit
def known(row, rows, slots, MATCH: tl.constexpr):
    """(the ring's sequence, position) of a row."""
    slot = tl.load(rows[3] + row, volatile=True).to(tl.int64)
    pos = tl.load(rows[4] + row, volatile=True).to(tl.int32)
    if MATCH:
        slot = tl.load(slots + slot, volatile=True).to(tl.int64)
    return slot, pos


@triton.jit
def account(pos, slot, g, ring, C: tl.constexpr, G: tl.constexpr):
    """The guard's account before a row at `pos`, in KV head g; full where the row before is not known."""
    _, stamp, _, credit, _ = ring
    before = tl.where(pos > 0, (pos - 1) % C, 0)
    at = tl.load(stamp + slot * C + before, cache_modifier=".cg")
    held = tl.load(credit + (slot * G + g) * C + before, cache_modifier=".cg")
    return tl.where((at == pos - 1) & (pos > 0), held, float("inf"))


@triton.jit
def places(pos, back, C: tl.constexpr):
    """Where the rows lie that are `back`, less than C, before the one before `pos`."""
    place = tl.where(pos > 0, (pos - 1) % C, 0) - back
    return tl.where(place < 0, place + C, place)


@triton.jit
def fetch(
    slot, pos, h, first, count, ring, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    AHEAD: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Bring into L2 rows [first, first + AHEAD) back, of `count`: queries, stamps and depths, and the arrivals."""
    query, stamp, depth, _, arrivals = ring
    VECTOR: tl.constexpr = D * (query.dtype.element_ty.primitive_bitwidth // 8)
    n = tl.minimum(tl.maximum(count - first, 0), AHEAD)
    k = tl.arange(0, AHEAD)
    place = places(pos, first + k, C)
    fetch_lines(stamp + slot * C + place, k < n)
    if BOUNDED:
        fetch_lines(depth + (slot * H + h) * C + place, k < n)
    one = tl.arange(0, 1)
    fetch_lines(arrivals + slot * G + h // (H // G) + one, one == 0)
    if VECTOR % 16 == 0:
        newest = tl.where(pos > 0, (pos - 1) % C, 0) - first  # its place, below 0 past where the ring wraps
        oldest = newest - n + 1
        low = tl.minimum(tl.maximum(newest + 1, 0), n)  # rows before the ring wraps, those of low places
        mine = query + (slot * H + h) * C * D
        fetch_stretch(mine + tl.maximum(oldest, 0).to(tl.int64) * D, low * VECTOR)
        fetch_stretch(mine + (oldest + C).to(tl.int64) * D, (n - low) * VECTOR)


@triton.jit
def fetch_lines(at, mask):
    """Bring the cache lines at these addresses into L2."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p prefetch.global.L2 [$1]; }",
        "=r,l,r", [at.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def fetch_stretch(at, size):
    """Bring `size` bytes, a multiple of 16, from one address on into L2: one thread asks for all."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.gt.and.s32 p, $2, 0, p; "
        "mov.b32 $0, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; }",
        "=r,l,r", [at.to(tl.int64) // 16 * 16, size.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
