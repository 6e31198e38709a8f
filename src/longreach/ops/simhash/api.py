"""Sampling keys by locality-sensitive hashing: the front doors of codes, build, seal, collide and weigh.

A decode step of MagicPIG (Chen et al., 2024, arXiv 2410.16179) hashes the queries (`codes`), looks up the keys that
fall into the same buckets (`collide`), and gives each the log-weight that makes attention over the sample unbiased
(`weigh`). `build` adds new keys to the tables by their codes; `seal` hashes those of a cache and adds them. Given the
same codes, all implementations choose the same keys.

A vector is *void* if its squared norm in fp32 is zero or not finite: zeros, NaN, infinities. Its code is 0 in all
tables. Two void vectors always collide, so u = 1. A void and another vector have p = 1/2, which is how often they do.
So void vectors are sampled without bias, and weights are always finite.

No gradient flows through any result.
All raise InvalidInput for shapes, dtypes and devices that do not fit, and UnknownName for an unknown impl.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longreach.ops.checks import check_memory, limits
from longreach.ops.doors import Later, Op, Read
from longreach.ops.impl import Implementations
from longreach.ops.selection import Lists, Per
from longreach.ops.simhash.probability import check_law
from longreach.ops.simhash.tables import HashTables
from longreach.ops.types import FLOATS, INTS, KVView, Rows, describe, require

Share = Literal["group", "own"]
MOST_KEYS = 1 << 30


def _named(op: str) -> Implementations:
    paths = {name: f"longreach.ops.simhash.{name}:{op}" for name in ("reference", "triton", "numba")}
    return Implementations(f"simhash.{op}", paths)


CODING = _named("codes")
BUILDING = _named("build")
COLLIDING = _named("collide")
SEALING = _named("seal")
WEIGHING = _named("weigh")


@dataclass(frozen=True)
class Collisions:
    """Keys sampled for each row, as `Lists` take them.

    index: int32 [R, heads, C], ascending positions; count: int32 [R, heads], entries in use. Entries past `count` are
    undefined. A count above C is an overflow: then all entries are undefined.
    per: "kv" (a list per KV head) or "query" (one per query head).
    met: uint8 like index, the number of query heads that sampled the key: 1 to H / G for "kv", 1 for "query".
    looked_up: int32 [R, heads], ids read from buckets.
    least: tables in which a key had to collide.
    """

    index: Tensor
    count: Tensor
    per: Per
    met: Tensor
    looked_up: Tensor
    least: int

    def lists(self, log_weight: Tensor | None = None) -> Lists:
        """The lists with weights. The tables must hold only keys that are visible to the rows."""
        return Lists(self.index, self.count, log_weight, self.per, all_visible=self.per == "kv")


class Weights(NamedTuple):
    """Log-weights and variance factors of the sampled keys, fp32 [R, heads, C]; entries past `count` are undefined.

    log_weight: added to the key's logit. factor: 1 - u, of the key's squared deviation in the variance of the output
    (`sampling_variance`).
    """

    log_weight: Tensor
    factor: Tensor


@torch.no_grad()
def codes(x: Tensor, projections: Tensor, *, centre: Tensor | None = None, impl: str = "auto") -> Tensor:
    """SimHash codes of vectors: uint16 [..., tables], bit b of table l set where (x - centre) . projections[l, b] > 0.

    x: float [..., D]; projections: bf16 [tables, bits, D], on x's device. Products are summed in fp32 (fp64 for fp64).
    centre: float, broadcasts to x; keys need one, queries None. It is subtracted here, in fp32, not by the caller: a
        difference rounded to bf16 would have another angle than the one that `weigh` computes, and would be a copy of
        all keys.
    Implementations may differ in a bit where its projection is within rounding of zero.
    """
    ok = isinstance(x, Tensor) and x.dtype in FLOATS and x.dim() >= 1
    require(ok, lambda: f"x: expected float [..., D], got {describe(x)}")
    dim = x.shape[-1]
    ok = isinstance(projections, Tensor) and projections.dtype == torch.bfloat16 and projections.dim() == 3
    ok = ok and projections.shape[2] == dim and projections.device == x.device
    require(
        ok, lambda: f"projections: expected bf16 [tables, bits, D={dim}] on {x.device}, got {describe(projections)}"
    )
    check_law(projections.shape[1], projections.shape[0], 1)
    if centre is not None:
        ok = isinstance(centre, Tensor) and centre.is_floating_point() and centre.device == x.device
        ok = ok and centre.dim() <= x.dim() and centre.shape[-1:] == x.shape[-1:]
        ok = ok and all(a in (1, b) for a, b in zip(reversed(centre.shape), reversed(x.shape), strict=False))
        require(ok, lambda: f"centre: expected float that broadcasts to {describe(x)}, got {describe(centre)}")
    found: Tensor = CODING.get(impl, x.device, x, centre)(x, projections, centre)
    return found


@torch.no_grad()
def build(tables: HashTables, codes: Tensor, seq: Tensor, count: Tensor, *, impl: str = "auto") -> None:
    """Add keys to the tables, in place: key t of entry s gets position max(stop, first) + t of sequence seq[s].

    codes: uint16 [S, T, G, tables]; seq: int [S], distinct sequences; count: int [S], the first `count` of the T keys
    are added. It raises `tables.stop`. Only segments that receive keys are written. The tables depend on the keys
    alone, not on the calls that added them. If the Numba kernels are interrupted or fail, `stop` and the keys below it
    are as before. If the reference is interrupted, `stop` may fall to the start of the segment that it was writing; the
    caller then adds its keys again.
    On a CPU values are checked. InvalidInput is raised for sequences named twice or out of range, counts outside
    [0, T], keys past the N positions of a sequence, and codes of 2^bits or more. On a GPU they must be valid.
    """
    require(isinstance(tables, HashTables), lambda: f"tables: expected HashTables, got {describe(tables)}")
    shape = (tables.heads, tables.tables)
    ok = isinstance(codes, Tensor) and codes.dtype == torch.uint16 and codes.dim() == 4 and codes.shape[2:] == shape
    require(ok, lambda: f"codes: expected uint16 [S, T, G={shape[0]}, tables={shape[1]}], got {describe(codes)}")
    for name, x in (("seq", seq), ("count", count)):
        ok = isinstance(x, Tensor) and x.dtype in INTS and x.shape == codes.shape[:1]
        require(ok, lambda: f"{name}: expected int32 or int64 [S={codes.shape[0]}], got {describe(x)}")
    for name, x in (("codes", codes), ("seq", seq), ("count", count)):
        at = tables.ids.device
        require(x.device == at, lambda: f"{name}: expected on {at} like the tables, got {describe(x)}")
    if tables.ids.device.type == "cpu" and seq.numel():
        check_sequences("seq", seq, tables)
        require(len(seq.unique()) == len(seq), lambda: f"seq: expected distinct sequences, got {seq.tolist()}")
        low, high, most = int(count.min()), int(count.max()), codes.shape[1]
        require(low >= 0 and high <= most, lambda: f"count: expected in [0, T={most}], got {low} to {high}")
        start, room = tables.stop[seq.long()].clamp(min=tables.first), tables.ids.shape[3]
        end = int(torch.where(count > 0, start + count, 0).max())
        require(end <= room, lambda: f"count: expected keys at positions below N={room}, got some up to {end - 1}")
        _check_codes(codes, tables)
    BUILDING.get(impl, tables.ids.device)(tables, codes, seq, count)


@torch.no_grad()
def seal(
    kv: KVView,
    slots: Tensor,
    tables: HashTables,
    projections: Tensor,
    centre: Tensor,
    stop: Tensor,
    *,
    centred: int,
    block: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Hash the keys of a view and add them to the tables, in place. Returns the previous ends of the tables: int32 [B].

    Of sequence b the keys up to position stop[b] are added. The centre of the sequence is subtracted before hashing.

    slots: int [B], distinct: the entry of each sequence of the view in `tables` and in `centre`.
    stop: int [B]. Tables that already reach stop[b] are not changed. The view must hold all keys below stop[b].
    projections: bf16 [tables, bits, D].
    centre: fp32 [sequences of the tables, G, D], contiguous. It is written when the first keys of a sequence enter the
        tables: it becomes the mean of keys [first, first + centred), which the view must hold. The mean leaves out keys
        that are not finite.
    centred: keys of the mean. 0: `centre` is not changed.
    block: for few new keys: the Triton kernels add at most so many of each sequence, and the others by later calls.
        They need 2 B G tables block bytes of memory. None: for many new keys, such as a prompt's: the Triton kernels
        take segments one by one, if there are keys of them or not.
    On a GPU the host does not wait: kernels take the amount of work from `stop` on the device. If an exception
    interrupts the call, keys below `tables.stop` are right for each sequence, and the next call adds the others.
    On a CPU raises InvalidInput for a stop past the keys of a sequence or past the tables' N positions.
    """
    require(isinstance(kv, KVView), lambda: f"kv: expected a KVView, got {describe(kv)}")
    require(isinstance(tables, HashTables), lambda: f"tables: expected HashTables, got {describe(tables)}")
    require(kv.slot_pos is None, "kv: expected slots in the order of positions, got slot_pos; hashing has no eviction")
    heads, dim, at = kv.heads, kv.k.shape[3], kv.k.device
    ok = tables.heads == heads and tables.ids.device == at
    require(ok, lambda: f"tables: expected {heads} KV heads on {at}, got {tables.heads} on {tables.ids.device}")
    shape = (tables.tables, tables.bits, dim)
    ok = isinstance(projections, Tensor) and projections.dtype == torch.bfloat16 and projections.shape == shape
    ok = ok and projections.device == at
    require(ok, lambda: f"projections: expected bf16 {list(shape)} on {at}, got {describe(projections)}")
    shape = (tables.ids.shape[0], heads, dim)
    ok = isinstance(centre, Tensor) and centre.dtype == torch.float32 and centre.shape == shape
    ok = ok and centre.is_contiguous() and centre.device == at
    require(ok, lambda: f"centre: expected contiguous fp32 {list(shape)} on {at}, got {describe(centre)}")
    for name, x in (("slots", slots), ("stop", stop)):
        ok = isinstance(x, Tensor) and x.dtype in INTS and x.shape == (kv.sequences,) and x.device == at
        require(ok, lambda: f"{name}: expected int32 or int64 [B={kv.sequences}] on {at}, got {describe(x)}")
    for name, value, least in (("centred", centred, 0), ("block", 1 if block is None else block, 1)):
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
        require(ok, lambda: f"{name}: expected an int >= {least}, got {value!r}")
    if at.type == "cpu" and slots.numel():
        check_sequences("slots", slots, tables)
        require(len(slots.unique()) == len(slots), lambda: f"slots: expected distinct ones, got {slots.tolist()}")
        held = tables.stop[slots.long()].clamp(min=tables.first)
        for_centre = torch.where(held == tables.first, tables.first + centred, 0)
        needed = torch.where(stop > held, torch.maximum(stop, for_centre), 0)
        there = kv.seq_lens.clamp(max=tables.ids.shape[3])
        require(
            bool((needed <= there).all()),
            lambda: f"stop: expected at most the {there.tolist()} keys there, got {needed.tolist()}, centres included",
        )
    found: Tensor = SEALING.get(impl, at)(
        kv, slots, tables, projections, centre, stop, centred=centred, block=block or 0
    )  # fmt: skip
    return found


@torch.no_grad()
def collide(
    rows: Rows,
    tables: HashTables,
    codes: Tensor,
    *,
    capacity: int,
    least: int = 2,
    share: Share = "group",
    impl: str = "auto",
) -> Collisions:
    """The keys whose codes equal the query's in at least `least` tables, found by look-ups in the tables alone.

    rows: their sequences are used. codes: uint16 [R, H, tables], of the queries. capacity: entries of a list.
    share: "own", a list per query head; "group", one per KV head, of the keys that any of its query heads sampled.
    """
    require(isinstance(rows, Rows), lambda: f"rows: expected Rows, got {describe(rows)}")
    require(isinstance(tables, HashTables), lambda: f"tables: expected HashTables, got {describe(tables)}")
    shape = (*rows.q.shape[:2], tables.tables)
    ok = isinstance(codes, Tensor) and codes.dtype == torch.uint16 and codes.shape == shape
    require(ok, lambda: f"codes: expected uint16 [R, H, tables] = {list(shape)}, got {describe(codes)}")
    for name, at in (("codes", codes.device), ("tables", tables.ids.device)):
        require(at == rows.q.device, lambda: f"{name}: expected on {rows.q.device} like the rows, got {at}")
    check_group(rows, tables)
    ok = isinstance(capacity, int) and not isinstance(capacity, bool) and 1 <= capacity < MOST_KEYS
    require(ok, lambda: f"capacity: expected an int in [1, {MOST_KEYS}), got {capacity!r}")
    check_law(tables.bits, tables.tables, least)
    require(share in ("own", "group"), lambda: f"share: expected 'own' or 'group', got {share!r}")
    if tables.ids.device.type == "cpu" and rows.seq.numel():
        check_sequences("rows.seq", rows.seq, tables)
        _check_codes(codes, tables)
    per: Per = "kv" if share == "group" else "query"
    found = COLLIDING.get(impl, rows.q.device, rows)(rows, tables, codes, capacity=capacity, least=least, per=per)
    index, count, met, looked_up = found
    return Collisions(index, count, per, met, looked_up, least)


@torch.no_grad()
def weigh(
    rows: Rows,
    kv: KVView,
    tables: HashTables,
    found: Collisions,
    centre: Tensor,
    *,
    floor: float = 0.0,
    impl: str = "auto",
) -> Weights:
    """The log-weights of sampled keys, and the factors of their variance.

    u is `inclusion` of p = 1 - acos(cos(q, k - centre)) / pi. In a list per query head, the log-weight is -log u. In
    a list per KV head it is log(met / sum of its query heads' u). The mean of met is that sum, so this is unbiased,
    however the heads' samples correlate. The factor is 1 - u, and in a list per KV head 1 - sum u^2 / sum u. That is
    the variance if the query heads sample the key together, and too much if they do so independently.

    tables, found: those of `collide`, with entries that name slots of the view. centre: float [B, G, D], subtracted
    from keys in fp32. It must be the one their codes were computed with.
    floor: in [0, 1); a smaller u counts as this much. It bounds the weights, and biases keys with u below it.
    On a CPU raises SelectionError for entries that name slots that are not in use.
    """
    check_memory(rows, kv)
    require(isinstance(tables, HashTables), lambda: f"tables: expected HashTables, got {describe(tables)}")
    require(isinstance(found, Collisions), lambda: f"found: expected Collisions, got {describe(found)}")
    require(kv.slot_pos is None, "kv: expected slots in the order of positions, got slot_pos; hashing has no eviction")
    check_group(rows, tables)
    same = tables.heads == kv.heads
    require(same, lambda: f"tables: expected the view's {kv.heads} KV heads, got {tables.heads}")
    heads = kv.heads if found.per == "kv" else rows.q.shape[1]
    entries = (*rows.q.shape[:1], heads, *found.index.shape[2:])
    for name, dtype, wanted in (
        ("index", torch.int32, entries),
        ("met", torch.uint8, entries),
        ("count", torch.int32, entries[:2]),
    ):
        part = getattr(found, name)
        ok = part.dtype == dtype and part.shape == wanted and part.device == kv.k.device
        wants = f"{dtype} {list(wanted)} on {kv.k.device}"
        require(ok, lambda: f"found.{name}: expected {wants}, as collide gives it, got {describe(part)}")
    shape = (kv.sequences, kv.heads, kv.k.shape[3])
    ok = isinstance(centre, Tensor) and centre.is_floating_point() and centre.shape == shape
    ok = ok and centre.device == kv.k.device
    require(ok, lambda: f"centre: expected float [B, G, D] = {list(shape)} on {kv.k.device}, got {describe(centre)}")
    ok = isinstance(floor, (int, float)) and math.isfinite(floor) and 0 <= floor < 1
    require(ok, lambda: f"floor: expected a number in [0, 1), got {floor!r}")
    weights: tuple[Tensor, Tensor] = WEIGHING.get(impl, kv.k.device, rows, kv, centre)(
        rows, kv, tables, found, centre, floor=float(floor)
    )
    return Weights(*weights)


def check_group(rows: Rows, tables: HashTables) -> None:
    heads = rows.q.shape[1]
    fits = heads % tables.heads == 0 and 1 <= heads // tables.heads <= 16
    require(fits, lambda: f"heads: {heads} query heads must be 1 to 16 times the {tables.heads} KV heads of the tables")


def check_sequences(name: str, seq: Tensor, tables: HashTables) -> None:
    (low, high), most = limits(seq), tables.ids.shape[0]
    require(low >= 0 and high < most, lambda: f"{name}: expected in [0, B={most}), got {low} to {high}")


def _check_codes(codes: Tensor, tables: HashTables) -> None:
    if tables.bits < 16 and codes.numel():
        low, high = codes.contiguous().view(torch.int16).aminmax()  # those of 2^15 and more are negative there
        require(
            int(low) >= 0 and int(high) < 1 << tables.bits,
            lambda: f"codes: expected below 2^bits = {1 << tables.bits}, got larger ones",
        )


def _codes_reads(
    rows: Rows, kv: KVView, found: Tensor, x: Tensor, projections: Tensor, **given: object
) -> tuple[Read, ...]:
    """The directions, once for all rows."""
    return (Read(other=projections.numel() * projections.element_size()),)


def _collide_reads(
    rows: Rows, kv: KVView, found: Collisions, tables: HashTables, codes: Tensor, **given: object
) -> tuple[Read, ...]:
    """Two offsets for each query head, table and segment, and the ids of the buckets."""
    stop = tables.stop[rows.seq.long()]
    return (Read(other=look_ups(rows.q.shape[1], tables, stop) + 2 * found.looked_up.sum(1)),)


def look_ups(heads: int, tables: HashTables, stop: Tensor) -> Tensor:
    """int64 like stop: bytes of two offsets for each query head, table and segment of tables that end at stop."""
    segments = torch.where(stop > tables.first, -(-stop // tables.size) - tables.first // tables.size, 0)
    return segments.long() * (heads * tables.tables * 2 * tables.offsets.element_size())


def _weigh_reads(
    rows: Rows, kv: KVView, weights: Weights, tables: HashTables, found: Collisions, centre: Tensor, **given: object
) -> tuple[Read, ...]:
    """The keys of lists that did not overflow, and a centre for each row and KV head."""
    fits = found.count <= found.index.shape[2]
    selection = replace(found.lists(), count=torch.where(fits, found.count, 0))
    one = kv.heads * kv.k.shape[3] * centre.element_size()
    return Read.of(kv, selection, values=False), Read(other=len(rows.pos) * one)


def _seal_reads(
    rows: Rows,
    kv: KVView,
    held: Tensor,
    tables: HashTables,
    projections: Tensor,
    centre: Tensor,
    stop: Tensor,
    *,
    centred: int,
    **given: object,
) -> tuple[Read, ...]:
    """Keys that are hashed, those of the centre, and the ids of their segment that are moved; at each last row."""
    of = _sealed(
        tables.first, tables.size, centred, kv.heads * kv.k.shape[3] * kv.k.element_size(),
        tables.heads * tables.tables * tables.ids.element_size(), projections.numel() * projections.element_size(),
    )  # fmt: skip
    return (Read(other=Later(of, (held, stop), (rows.seq, rows.pos, kv.seq_lens))),)


@cache
def _sealed(first: int, size: int, centred: int, key: int, ids: int, directions: int) -> Callable[..., Tensor]:
    """Bytes by the ends of the tables before and after, [L, B]; one function for equal arguments.

    key: bytes of a position's keys. ids: bytes of its ids. directions: bytes of the projections.
    """

    def of(held: Tensor, stop: Tensor, seq: Tensor, pos: Tensor, lengths: Tensor) -> Tensor:
        start = held.long().clamp(min=first)
        new = (stop - start).clamp(min=0)
        keys = new + centred * ((held <= first) & (new > 0))
        moved = torch.where(new > 0, start - (start // size * size).clamp(min=first), 0)
        amount = keys * key + moved * ids + (new > 0) * directions
        return torch.where(pos + 1 == lengths[seq.long()], amount[:, seq.long()], 0)

    return of


BUILD = Op(build, BUILDING, ())  # the caller counts the old entries that are moved: their number is not an argument
CODES = Op(codes, CODING, (), _codes_reads)
COLLIDE = Op(collide, COLLIDING, ("rows",), _collide_reads)
SEAL = Op(seal, SEALING, ("kv", "slots"), _seal_reads)
WEIGH = Op(weigh, WEIGHING, reads=_weigh_reads)
