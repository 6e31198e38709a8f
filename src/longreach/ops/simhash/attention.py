"""A decode step of MagicPIG in one call: the front door of attend_sampled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.ops.checks import check_memory
from longreach.ops.doors import EVERYTHING, Op, Read
from longreach.ops.impl import Implementations
from longreach.ops.partial import merge
from longreach.ops.selection import Lists, Per, Span, Spans, absolute, relative
from longreach.ops.simhash.api import Share, check_group, check_sequences
from longreach.ops.simhash.probability import check_law
from longreach.ops.simhash.tables import HashTables
from longreach.ops.types import INTS, KVView, Partial, Rows, describe, require

ATTENDING = Implementations(
    "simhash.attend_sampled",
    {
        "reference": "longreach.ops.simhash.reference:attend_sampled",
        "triton": "longreach.ops.simhash.triton_attention:attend_sampled",
        "numba": "longreach.ops.simhash.numba_attention:attend_sampled",
    },
    few_rows=True,
    cpu="longreach.ops.simhash.numba_host:attend_sampled",
)


# Columns of SampledAttention.numbers, of a row and KV head:
# - union: keys that any query head sampled
# - met: sum over keys of the query heads that sampled each, in lists that did not overflow
# - overflowed: lists that overflowed
# - weighed: keys read for weights
# - attended: keys and values read for attention
# - searched: bytes of look-ups
# - end: end of the tables
NUMBERS = ("union", "met", "overflowed", "weighed", "attended", "searched", "end")

# of Triton's kernels: query heads of a program, the others masked; words of counters; buckets looked up at a time
HEADS, ROOM, BUCKETS = 16, 8192, 1024
PROGRAMS, MOST_SPLITS = 512, 4  # programs that fill a GPU; most programs that attend to the keys of a part


class SampledAttention(NamedTuple):
    """Attention over a sample, and what it read.

    partial: over the keys that are always attended to and the sample. lists: the sample with its log-weights, of each
    KV head (share="group") or query head (share="own"); those with more keys than the row's limit overflowed, and all
    keys were attended to. None from Triton's kernels, which make no lists. numbers: int64 [R, G, NUMBERS].
    """

    partial: Partial
    lists: Lists | None
    numbers: Tensor

    def number(self, name: str) -> Tensor:
        """int64 [R, G]: a column of numbers."""
        return self.numbers[..., NUMBERS.index(name)]


@torch.no_grad()
def attend_sampled(
    rows: Rows,
    kv: KVView,
    slots: Tensor,
    tables: HashTables,
    projections: Tensor,
    centre: Tensor,
    limit: Tensor,
    *,
    least: int = 2,
    share: Share = "group",
    sinks: int = 0,
    floor: float = 0.0,
    scale: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    impl: str = "auto",
) -> SampledAttention:
    """`codes`, `collide`, `weigh` and attention in one call (MagicPIG, arXiv 2410.16179, Algorithm 1).

    A row attends to slots [0, sinks) and to those from the end of its tables on, with weight 1; and to the keys of the
    tables that it samples, with the log-weights of `weigh`. A list with more keys than limit[r] attends to all keys.
    slots: int [B], the sequence in tables and centre of each of the view. projections: bf16 [tables, bits, D]. centre:
    fp32 [sequences of the tables, G, D]. limit: int [R]. Keys in the tables must be visible to the rows. least, share,
    floor: as in `collide` and `weigh`; scale, softcap, sink_logit: as in `attend`. The result is that of the four ops,
    with the same sample.
    Raises InvalidInput for what does not fit. For error bars, which need lists and factors, call the four ops.
    """
    check_memory(rows, kv)
    require(isinstance(tables, HashTables), lambda: f"tables: expected HashTables, got {describe(tables)}")
    require(kv.slot_pos is None, "kv: expected slots in the order of positions, got slot_pos; hashing has no eviction")
    check_group(rows, tables)
    at, heads, dim = kv.k.device, kv.heads, kv.k.shape[3]
    ok = tables.heads == heads and tables.ids.device == at
    require(ok, lambda: f"tables: expected {heads} KV heads on {at}, got {tables.heads} on {tables.ids.device}")
    for name, x, dtype, shape in (
        ("projections", projections, torch.bfloat16, (tables.tables, tables.bits, dim)),
        ("centre", centre, torch.float32, (tables.ids.shape[0], heads, dim)),
    ):
        ok = isinstance(x, Tensor) and x.dtype == dtype and x.shape == shape and x.device == at
        require(ok, lambda: f"{name}: expected {dtype} {list(shape)} on {at}, got {describe(x)}")
    for name, x, count in (("slots", slots, kv.sequences), ("limit", limit, len(rows.pos))):
        ok = isinstance(x, Tensor) and x.dtype in INTS and x.shape == (count,) and x.device == at
        require(ok, lambda: f"{name}: expected int32 or int64 [{count}] on {at}, got {describe(x)}")
    check_law(tables.bits, tables.tables, least)
    require(share in ("own", "group"), lambda: f"share: expected 'own' or 'group', got {share!r}")
    ok = isinstance(sinks, int) and not isinstance(sinks, bool) and sinks >= 0
    require(ok, lambda: f"sinks: expected a count >= 0, got {sinks!r}")
    ok = isinstance(floor, (int, float)) and math.isfinite(floor) and 0 <= floor < 1
    require(ok, lambda: f"floor: expected a number in [0, 1), got {floor!r}")
    if at.type == "cpu" and slots.numel():
        check_sequences("slots", slots, tables)
    partial, lists, numbers = ATTENDING.get(impl, at, rows, kv)(
        rows, kv, slots, tables, projections, centre, limit, least=least, own=share == "own", sinks=sinks,
        floor=float(floor), scale=scale, softcap=softcap,
    )  # fmt: skip
    if sink_logit is not None:
        partial = merge(partial, Partial(torch.zeros_like(partial.out), sink_logit.float().expand_as(partial.lse)))
    if lists is None:
        return SampledAttention(partial, None, numbers)
    index, count, weight = lists
    per: Per = "kv" if share == "group" else "query"
    return SampledAttention(partial, Lists(index, count, weight, per, all_visible=share == "group"), numbers)


def look_up_bytes(group: int, tables: HashTables) -> int:
    """Of two offsets for each query head of a KV head and table, in a segment."""
    return group * tables.tables * 2 * tables.offsets.element_size()


def workspace_bytes(columns: int, tables: int, kv_heads: int, group: int, dim: int) -> int:
    """Bytes that Triton's kernels allocate for a row, results included, at most. columns: positions that the tables
    hold.
    """
    part = ROOM // words(group, tables)
    parts, dims = -(-columns // part), max(HEADS, 1 << (dim - 1).bit_length())
    results = parts * MOST_SPLITS * group * (dims + 2) + parts * (HEADS + 3) + group * (dim + 1)
    return kv_heads * (4 * (parts * part + results) + 2 * group * tables + 8 * len(NUMBERS))


def splits_of(items: int, parts: int) -> int:
    """Programs that attend to the keys of a part. items: rows times KV heads."""
    return max(1, min(MOST_SPLITS, PROGRAMS // (items * parts)))


def words(group: int, tables: int) -> int:
    """How many int32 hold a key's counters of tables, one for each query head: a power of 2."""
    return 1 << (-(-group // counters(tables)) - 1).bit_length()


def counters(tables: int) -> int:
    """How many counters of tables, one for each query head, share an int32."""
    return 4 if tables < 256 else 2


def _reads(
    rows: Rows, kv: KVView, found: SampledAttention, tables: HashTables, projections: Tensor, centre: Tensor,
    limit: Tensor, *, sinks: int = 0, **given: Any,
) -> tuple[Read, ...]:  # fmt: skip
    """Those of the four ops, so that reports agree: sampled keys count twice, for their weights and for attention,
    though this kernel reads them once. Triton's kernels read no lists.
    """
    one = kv.heads * kv.k.shape[3] * centre.element_size()
    search = (
        Read(other=projections.numel() * projections.element_size()),
        Read(other=len(rows.pos) * one),
        Read(other=found.number("searched")),
    )
    lists = found.lists
    if lists is None:
        weighed, attended = found.number("weighed"), found.number("attended")
        return (
            *search,
            Read.of(kv, EVERYTHING, values=False, counted=weighed),
            Read.of(kv, EVERYTHING, counted=attended)._replace(overflowed=found.number("overflowed")),
        )
    over, context = lists.overflowed, rows.pos.long()[:, None] + 1
    listed = replace(lists, count=lists.count.masked_fill(over, 0), log_weight=None)
    start = found.number("end")[:, :1].clamp(min=sinks)
    # a list that overflowed is attended to as everything, so nothing is left for the spans
    first, rest = torch.where(over, 0, sinks), torch.where(over, context, start)
    always = Spans((Span(absolute(0), absolute(first)), Span(absolute(rest), relative(1))), lists.per)
    return *search, Read.of(kv, listed, values=False), Read.of(kv, always), Read.of(kv, lists)


ATTEND_SAMPLED = Op(attend_sampled, ATTENDING, ("rows", "kv", "slots", "scale", "softcap", "sink_logit"), _reads)
