"""attend on the GPU: what the kernels need to know, made from Rows, KVView and Selection without a device sync."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.attend import triton_backward as backward
from longreach.ops.attend import triton_kernels as kernels
from longreach.ops.attend import triton_merging as merging
from longreach.ops.attend import triton_prompt_tiles as tiles
from longreach.ops.attend import triton_wide as wider
from longreach.ops.attend import triton_wide_kernels as wide_kernels
from longreach.ops.attend.tiles import Tiles, tiles_of
from longreach.ops.attend.triton_tuning import (
    INTERPRETED,
    Tuning,
    keeping_tuning,
    merge_tuning,
    next_power_of_2,
    tuning,
)
from longreach.ops.head_parts import part_of
from longreach.ops.selection import Bound, Lists, PackedLists, Selection, Span, Spans, absolute
from longreach.ops.tile_lists import TileLists
from longreach.ops.types import KERNEL_GROUP, KERNEL_WIDEST, KVView, Logits, Partial, Rows, ScoringKeys

FAR = (1 << 30) - 1
MOST_DEALT = 8192  # entries of the table of items and rows that every program goes through to find its share
NOTHING: tuple[int, int, int] = (0, 0, 0)


def attend(
    rows: Rows, kv: KVView, selection: Selection, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> Partial:
    return prepare(rows, kv, selection, scale=scale, softcap=softcap, sink_logit=sink_logit)()


def prepare(
    rows: Rows, kv: KVView, selection: Selection, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> Callable[[], Partial]:
    """attend, with all that depends on shapes and on the selection's form alone found once."""
    if backward.wanted(rows, kv, selection, sink_logit):
        refuse(rows, kv, selection, sink_logit, gradients=True)
        backward.refuse(rows, kv, selection)
        with torch.no_grad():
            plain = prepare(rows, kv, selection, scale=scale, softcap=softcap, sink_logit=None)
        return partial(backward.attend, plain, rows, kv, selection, scale, softcap, sink_logit)
    refuse(rows, kv, selection, sink_logit)
    wide = wider.is_wide(rows.q.shape[2], kv.group(rows))
    if isinstance(selection, TileLists):
        tiles.refuse(rows, kv, selection)
    if isinstance(selection, TileLists) and not wide:
        return partial(tiles.attend_tiles, rows, kv, selection, scale, softcap, sink_logit)
    if isinstance(selection, Lists) and sink_logit is None and not wide and backward.by_block(rows, kv, selection):
        return partial(backward.attend_by_block, rows, kv, selection, scale, softcap)

    def plan_now() -> _Plan:
        return _plan(rows, kv, selection, None, None, parts=1, values=True)

    plan = plan_now() if rows.q.shape[0] else None
    by_position = plan is not None and plan.tiles.table is not None  # the tiles follow what rows.pos holds

    def run() -> Partial:
        out = rows.q.new_empty(rows.q.shape, dtype=torch.float32)
        lse = rows.q.new_empty(rows.q.shape[:2], dtype=torch.float32)
        if plan is not None:
            with torch.cuda.device_of(rows.q):
                _launch(plan_now() if by_position else plan, rows, kv, scale, softcap, sink_logit, out, lse)
        return Partial(out, lse)

    return run


def attend_split(
    rows: Rows, kv: KVView, selection: Selection, split: Bound, *, scale: float, softcap: float | None
) -> tuple[Partial, Partial]:
    first, second = launch(rows, kv, selection, scale=scale, softcap=softcap, sink_logit=None, split=split)
    return first, second


def launch(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    *,
    scale: float,
    softcap: float | None,
    sink_logit: Tensor | None,
    split: Bound | None,
    tune: Tuning | None = None,
) -> list[Partial]:
    """One Partial, or one for each side of `split`. tune: how to launch instead of what `tuning` says."""
    refuse(rows, kv, selection, sink_logit)
    count, heads, dim = rows.q.shape
    parts = 1 if split is None else 2
    out = rows.q.new_empty((parts, count, heads, dim), dtype=torch.float32)
    lse = rows.q.new_empty((parts, count, heads), dtype=torch.float32)
    with torch.cuda.device_of(rows.q):
        launch_into(rows, kv, selection, scale, softcap, sink_logit, split, tune, out, lse)
    return [Partial(o, x) for o, x in zip(out, lse, strict=True)]


def refuse(rows: Rows, kv: KVView, selection: Selection, sink_logit: Tensor | None, *, gradients: bool = False) -> None:
    """Raise Unsupported for what these kernels cannot do and the reference can. gradients: a backward is provided."""
    if rows.q.dtype == torch.float64:
        raise Unsupported("attend's Triton kernels compute in fp32; for fp64 use impl='reference'")
    weight = getattr(selection, "log_weight", None)
    if torch.is_grad_enabled() and not gradients:
        for name, x in (("q", rows.q), ("k", kv.k), ("v", kv.v), ("log_weight", weight), ("sink_logit", sink_logit)):
            if x is not None and x.requires_grad:
                raise Unsupported(
                    f"attend's Triton kernels have no backward pass and {name} requires a gradient; "
                    f"use impl='reference', or torch.no_grad()"
                )
    if rows.q.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"attend's Triton kernels run on CUDA devices, got {rows.q.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )
    if INTERPRETED and rows.q.dtype == torch.bfloat16:
        raise Unsupported("attend's Triton kernels under TRITON_INTERPRET=1: it gets bf16 wrong; use fp16, or fp32")
    dim, group = rows.q.shape[2], rows.q.shape[1] // kv.heads
    if dim > KERNEL_WIDEST or group > KERNEL_GROUP:
        raise Unsupported(
            f"attend's Triton kernels take up to {KERNEL_WIDEST} channels a head and {KERNEL_GROUP} query heads a KV "
            f"head, got {dim} and {group}; use impl='reference'"
        )
    if kv.capacity >= FAR:
        raise Unsupported(f"attend's Triton kernels address {FAR - 1} slots a sequence, got {kv.capacity}")


class _Choice(NamedTuple):
    """A selection as the kernels take it; see attend_pieces."""

    spans: tuple[Any, ...]
    lists: tuple[Any, ...]
    kinds: tuple[Any, ...]
    listing: tuple[Any, ...] | None
    own: bool  # query heads of one KV head differ in their spans
    apart: bool  # every query head has a list of its own
    uniform: bool  # the rows of a tile start their spans together
    ending: bool  # a row's query heads end their one span together


class _Plan(NamedTuple):
    """What a launch needs of shapes, strides and the selection's form, found once for launches that differ in nothing
    but what their tensors hold."""

    choice: _Choice
    tiles: Tiles
    tune: Tuning
    large: bool  # whether the kernel is attend_wide
    group: int
    mr: int  # rows x heads of a tile
    items: int  # streams of keys
    programs: int
    dealt: bool  # whether blocks of all streams are dealt out among the programs
    options: dict[str, Any]  # of attend_pieces
    merging: dict[str, Any]  # of merge_pieces, and of what takes its place
    grid: tuple[int, int]  # of the same


def _plan(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    split: Bound | None,
    tune: Tuning | None,
    *,
    parts: int,
    values: bool,
    write: bool = False,
    keys: ScoringKeys | None = None,
    finished_apart: bool = False,
) -> _Plan:
    count, heads, dim = rows.q.shape
    group = kv.group(rows)
    large = wider.is_wide(dim, group)
    together = part_of(group, wider.most_rows(dim, rows.q.dtype, count)) if large else group
    if isinstance(selection, TileLists):
        choice = _choice(selection.lists, split, rows)
        choice = choice._replace(spans=((_bound(selection.own.spans[0].start)[0],), *choice.spans[1:]))
    else:
        choice = _choice(selection, split, rows)
    axis, per_item = (heads, 1) if choice.apart else (heads // together, together)
    if large:
        most = wider.most_rows(dim, rows.q.dtype, count) // per_item
    else:
        most = _rows_at_once(dim, per_item, rows.q.dtype)
    if isinstance(selection, TileLists):
        assert selection.tiles is not None
        tiles = wider.tiles_of(selection.tiles, most)
    else:
        tiles = tiles_of(rows, kv, selection, most=most)
    items = tiles.count * axis * parts
    own = per_item if choice.own else 1
    fewest = 4 if keys is not None else 16 if large or rows.q.dtype == torch.float32 else 8
    mr = tiles.size * per_item
    m = max(fewest, next_power_of_2(mr))
    i2, x = next_power_of_2(items), next_power_of_2(tiles.size * own)
    dealt = items <= 1024 and i2 * x <= MOST_DEALT
    if large:
        dealt = dealt and count < wider.PROMPT and not isinstance(selection, TileLists)
    wide = max(16 if keys is None else 32, next_power_of_2(dim))
    k = kv.k if keys is None else keys.k
    paged = kv.block_table is not None and kv.block_table.shape[1] > 1
    page = kv.page if paged else 0
    dense = isinstance(selection, Spans) and selection.is_dense
    if large:
        t = tune or wider.tuning(
            k.dtype, dim, m, lists=choice.listing is not None, page=page, dense=dense, items=items,
            shared=kv.values_in_keys,
        )  # fmt: skip
        t = wider.keeping(t) if write else t
    elif write:
        t = tune or keeping_tuning(k.dtype, wide, m, page=page, items=items, values=values, coded=keys is not None)
        assert t.unit == t.block and dense, (t, selection)
    else:
        lists = choice.listing is not None
        t = tune or tuning(rows.q.dtype, wide, m, lists=lists, page=page, dense=dense, items=items)
    programs = t.programs(rows.q.device) if dealt else 1
    if t.aligned and items < programs:
        programs -= programs % items

    evicted = kv.slot_pos is not None
    close = max(k.stride(2), kv.v.stride(2)) < 1 << 22  # 256 of them
    form = (parts, axis, per_item, own, evicted, len(choice.spans[0]), close)
    layout = (tiles.size, tiles.width, tiles.table is not None)
    chained = t.chained and dealt
    launch = {"launch_pdl": True} if chained else {}
    limits = {"maxnreg": t.registers} if t.registers else {}
    hull = not evicted and (choice.uniform or (tiles.size == 1 and (choice.ending or not choice.own)))
    options = {
        "layout": layout, "kinds": choice.kinds, "listing": choice.listing, "form": form, "PAGED": paged,
        "TABLED": kv.block_table is not None, "PAGE": page or 1, "HULL": hull, "DEALT": dealt,
        "I2": i2 if dealt else 1, "X": x, "M": m, "BN": t.block, "D": dim, "BD": wide, "STAGES": t.stages,
        "UNIT": t.unit, "CHAINED": chained, "num_warps": t.warps, **launch, **limits,
    }  # fmt: skip
    if large:
        first, rest = wider.channels(dim)
        subs = 1 if choice.apart else group // together
        counting = (parts, axis // subs, *form[2:]) if own == 1 else form
        options |= {"BD": first, "BT": rest, "SUBS": subs, "counting": counting}
        options |= {"OWN_KEYS": isinstance(selection, TileLists)}
    results = items // (parts if finished_apart else 1) * mr
    chunk = min(64, next_power_of_2(programs * parts // items + 2))  # one side of a split may hold nearly all
    channels, warps, early = merge_tuning(wide, results, chunk, values)
    channels = min(channels, wider.WIDE)
    merging = {"layout": layout, "form": form, "D": dim, "BD": channels, "C": chunk, "EARLY": early,
               "CHAINED": chained, "num_warps": warps, **launch}  # fmt: skip
    grid = results, wide // channels
    return _Plan(choice, tiles, t, large, group, mr, items, programs, dealt, options, merging, grid)


def launch_into(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    scale: float,
    softcap: float | None,
    sink_logit: Tensor | None,
    split: Bound | None,
    tune: Tuning | None,
    out: Tensor | None,
    lse: Tensor,
    read: Logits | None = None,
    write: bool = False,
    keys: ScoringKeys | None = None,
    finish: Callable[..., None] | None = None,
) -> Logits | None:
    """Fill out [parts, R, H, D] (None: values are not read) and lse [parts, R, H].

    finish: launches what puts pieces together in the place of merge_pieces, told how they lie; out and lse are then
    filled only where work is not dealt out.

    read: logits to take instead of reading keys; write: return the logits (of one dense span). keys: to read instead
    of kv.k, where values are not read.
    """
    if not rows.q.shape[0]:
        return _new_logits(rows, kv, 1) if write else None
    plan = _plan(
        rows, kv, selection, split, tune, parts=lse.shape[0], values=out is not None, write=write, keys=keys,
        finished_apart=finish is not None,
    )  # fmt: skip
    logits = _new_logits(rows, kv, plan.tune.block) if write else read
    _launch(plan, rows, kv, scale, softcap, sink_logit, out, lse, logits, write, keys, finish)
    return logits


def _launch(
    plan: _Plan,
    rows: Rows,
    kv: KVView,
    scale: float,
    softcap: float | None,
    sink_logit: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    logits: Logits | None = None,
    write: bool = False,
    keys: ScoringKeys | None = None,
    finish: Callable[..., None] | None = None,
) -> None:
    """As launch_into, by a plan made for these shapes, strides and this selection."""
    count, heads, dim = rows.q.shape
    tiles, choice, programs, items = plan.tiles, plan.choice, plan.programs, plan.items
    k = kv.k if keys is None else keys.k
    q = rows.q if rows.q.stride(2) == 1 and rows.q.stride(1) * heads < 1 << 31 else rows.q.contiguous()
    seq, filled = rows.seq.contiguous(), kv.seq_lens.contiguous()
    row_args = (
        q,
        q.stride(0),
        q.stride(1),
        seq,
        rows.pos.contiguous(),
        tiles.count,
        seq if tiles.table is None else tiles.table,
    )
    table = filled if kv.block_table is None else kv.block_table
    table = table if table.stride(-1) == 1 else table.contiguous()
    slot_pos = kv.k if kv.slot_pos is None else kv.slot_pos
    slot_pos = slot_pos if slot_pos.stride(-1) == 1 else slot_pos.contiguous()
    memory = (
        k,
        *k.stride()[:3],
        kv.v,
        *kv.v.stride()[:3],
        filled,
        table,
        table.stride(0),
        slot_pos,
        *slot_pos.stride()[:2],
        plan.group,
    )
    pieces = lse, lse, lse
    ends = lse
    values = out is not None
    if plan.dealt:
        slots = (programs + items) * plan.mr
        parts_of = lse.new_empty(slots * dim) if values else lse
        pieces = lse.new_empty(slots), lse.new_empty(slots), parts_of
        ends = torch.empty(items, dtype=torch.int32, device=q.device)
    sunk = sink_logit is not None
    sink = lse if sink_logit is None else sink_logit.contiguous()
    result = (lse if out is None else out, lse, sink, pieces, ends, heads, count)
    kept, kept_kind = _kept(logits, write, values, keys)
    options = {"keeping": kept_kind, "CAPPED": softcap is not None, "SUNK": sunk, **plan.options}
    if plan.large:
        options["SHARED"] = kv.values_in_keys and values and (logits is None or write)
    kernel = wide_kernels.attend_wide if plan.large else kernels.attend_pieces
    kernel[(programs if plan.dealt else items,)](
        row_args, memory, choice.spans, choice.lists, kept, result, float(scale), float(softcap or 1.0),
        items, programs, **options,
    )  # fmt: skip
    if finish is not None:
        finish(plan.grid, row_args, result, items, programs, DEALT=plan.dealt, **plan.merging)
    elif plan.dealt:
        merging.merge_pieces[plan.grid](row_args, result, items, programs, SUNK=sunk, VALUES=values, **plan.merging)


def _new_logits(rows: Rows, kv: KVView, block: int) -> Logits:
    """Room for the logits of one dense span: fp16 for half-precision inputs, else fp32."""
    shape = (rows.q.shape[0], kv.heads, kv.capacity, kv.group(rows))
    if rows.q.dtype == torch.float32:
        return Logits(rows.q.new_empty(shape))
    x = rows.q.new_empty(shape, dtype=torch.float16)
    return Logits(x, x.new_empty((*shape[:2], -(-kv.capacity // block), shape[3]), dtype=torch.float32), block)


def _kept(
    logits: Logits | None, write: bool, values: bool, keys: ScoringKeys | None
) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    """Kept logits as the kernels take them; see attend_pieces."""
    if logits is None:
        return (), None
    x, top, block = logits.x.contiguous(), logits.top, logits.block
    beside = x if top is None else top.contiguous()
    scale = beside if keys is None else keys.scale
    kind = (write, values, top is not None, block, x.shape[3], keys is not None)
    return (x, *x.stride()[:2], beside, *beside.stride()[:2], scale, *scale.stride()[:2]), kind


def _rows_at_once(dim: int, per_item: int, dtype: torch.dtype) -> int:
    """Rows of a tile: as many as fill the tensor cores and still leave room for keys and values."""
    most = 128 if dim <= 128 and dtype != torch.float32 else 64 if dim <= 128 else 32
    return max(1, most // per_item)


def _choice(selection: Selection, split: Bound | None, rows: Rows) -> _Choice:
    cut, cut_kind = (NOTHING, (None, None)) if split is None else _bound(split)
    if not isinstance(selection, (Spans, Lists, PackedLists)):
        raise Unsupported(f"attend's Triton kernels know Spans, Lists and PackedLists, got {type(selection).__name__}")
    spans = selection.spans if isinstance(selection, Spans) else ()
    bounds = [b for s in spans for b in s] + ([] if split is None else [split])
    wide = any(not isinstance(b.value, int) and b.value.shape[1] > 1 for b in bounds)
    if isinstance(selection, Spans):
        spans = spans or (Span(absolute(0), absolute(0)),)
        starts, start_kinds = zip(*(_bound(s.start) for s in spans), strict=True)
        stops, stop_kinds = zip(*(_bound(s.stop) for s in spans), strict=True)
        tensors, relative = zip(*(zip(*kinds, strict=True) for kinds in (start_kinds, stop_kinds)), strict=True)
        own = selection.per == "query" and wide
        together = split is None and all(_fixed(start) for start, _ in spans)
        ends = [s.stop for s in spans] + ([] if split is None else [split])
        ending = len(spans) == 1 and all(_one_for_all(b) for b in ends)
        kinds = (*tensors, *relative, *cut_kind)
        return _Choice((starts, stops, cut), (rows.pos,) * 5, kinds, None, own, False, together, ending)
    packed = isinstance(selection, PackedLists)
    heads = selection.heads if isinstance(selection, PackedLists) else selection.index.shape[1]
    count = selection.offsets if isinstance(selection, PackedLists) else selection.count
    capacity = 0 if isinstance(selection, PackedLists) else selection.index.shape[2]
    index, weight, of = selection.index.contiguous(), selection.log_weight, selection.row_to_list
    mapped = selection.head_map is not None and heads > 1
    lists = (
        index,
        count.contiguous(),
        index if weight is None else weight.contiguous(),
        rows.pos if of is None else of.contiguous(),
        rows.pos if not mapped or selection.head_map is None else selection.head_map.contiguous(),
    )
    kind = (heads, selection.block, packed, weight is not None, capacity, of is not None, mapped)
    apart = selection.per == "query" and heads > 1
    own = selection.per == "query" and wide and not apart
    return _Choice(((), (), cut), lists, ((), (), (), (), *cut_kind), kind, own, apart, True, True)


def _fixed(bound: Bound) -> bool:
    """Whether a bound is the same slot for every row."""
    return isinstance(bound.value, int) and not bound.relative


def _one_for_all(bound: Bound) -> bool:
    """Whether a bound is the same for all query heads of a KV head, whatever the selection's bounds belong to."""
    return isinstance(bound.value, int) or bound.value.shape[1] == 1


def _bound(bound: Bound) -> tuple[tuple[Any, int, int], tuple[bool, bool]]:
    """A bound as the kernels take it: (value, row stride, head stride), (tensor or not, relative or not)."""
    value = bound.value
    if isinstance(value, int):
        return (max(-FAR, min(FAR, value)), 0, 0), (False, bound.relative)
    return (value, value.stride(0), value.stride(1) if value.shape[1] > 1 else 0), (True, bound.relative)
