"""attend on a CPU, compiled by Numba: decode rows over spans and lists. It reads what the selection names, once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.attend import numba_kernels as kernels
from longreach.ops.attend.amend import Entries
from longreach.ops.checks import Once, each_time
from longreach.ops.numba_inputs import floats, memory_of, refuse
from longreach.ops.numba_inputs import integers as ints
from longreach.ops.numba_math import flat, in_turns
from longreach.ops.numba_softmax import merge as merge_pieces
from longreach.ops.partial import merge
from longreach.ops.selection import Bound, Lists, PackedLists, Selection, Span, Spans
from longreach.ops.types import KVView, Logits, Partial, Rows

LEAST = 512  # keys of a piece: fewer are not shared out among threads
ALONE = 2048  # keys of all rows and heads: fewer take less time than to wake another thread
PIECES = 4  # for each thread, where there are enough keys: threads that are done early take another one
NO_SPANS, NO_LISTS, NO_INDEX = np.zeros((1, 1, 2, 1), np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32)
NO_WEIGHT, NO_LOGITS = np.zeros(1, np.float32), np.zeros((1, 1, 1, 1), np.float32)


def attend(
    rows: Rows, kv: KVView, selection: Selection, *, scale: float, softcap: float | None, sink_logit: Tensor | None,
    once: Once = each_time,
) -> Partial:  # fmt: skip
    refuse("attend", rows, kv, sink_logit, getattr(selection, "log_weight", None))
    return add_sink(_attend(rows, kv, selection, scale, float(softcap or 0.0), once=once), sink_logit)


def attend_amend(
    rows: Rows, kv: KVView, selection: Selection, split: Bound, entries: Entries, read_entry: Tensor,
    write_entry: Tensor, *,
    scale: float, softcap: float | None, sink_logit: Tensor | None,
) -> tuple[Partial, Tensor]:  # fmt: skip
    refuse("attend_amend", rows, kv, sink_logit, getattr(selection, "log_weight", None), entries)
    before, after = (_attend(rows, kv, selection, scale, float(softcap or 0.0), part=(split, i)) for i in (0, 1))
    none, at = read_entry < 0, read_entry.clamp(min=0).long()
    earlier = Partial(entries.out[at].masked_fill(none[..., None], 0.0), entries.lse[at].masked_fill(none, -torch.inf))
    before = merge(before, earlier)
    some = write_entry >= 0
    places = write_entry[some].long()
    entries.out[places], entries.lse[places] = before.out[some], before.lse[some]
    return add_sink(merge(before, after), sink_logit), before.lse


def attend_from_logits(
    rows: Rows, kv: KVView, selection: Selection, kept: Logits, *, sink_logit: Tensor | None
) -> Partial:
    refuse("attend_from_logits", rows, kv, sink_logit, getattr(selection, "log_weight", None), kept)
    return add_sink(_attend(rows, kv, selection, 1.0, 0.0, kept=floats(kept.x)), sink_logit)


def _attend(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    scale: float,
    softcap: float,
    *,
    kept: np.ndarray | None = None,
    part: tuple[Bound, int] | None = None,
    once: Once = each_time,
) -> Partial:
    """kept: [R, G, N, group], the logits where they are known; else keys are read.

    part: a bound, and 0 for the selected slots before it, 1 for those from it on; None for all of them.
    once: finds the slots of spans once for several layers.
    """
    count, heads, dim = rows.q.shape
    work: _Work
    if isinstance(selection, Spans) and part is None:  # the key holds the selection, so that its id stays its own
        key = ("numba", id(selection), heads, kv.heads, torch.get_num_threads())
        work, _ = once(key, lambda: (_work(rows, kv, selection, None), selection))
    else:
        work = _work(rows, kv, selection, part)
    given = (work.seq, work.filled, work.low, work.high, np.float32(scale), work.units, work.share)
    units, width, parts, workers = work.units, work.width, work.parts, work.workers
    top, total = np.empty((2, count * units, parts, width), np.float32)
    results = (top, total, np.empty((count * units, parts, width, dim), np.float32))
    doubt = np.zeros(1, np.int64)
    known = (kept is not None, NO_LOGITS if kept is None else kept)
    q = flat(rows.q.contiguous())
    in_turns(workers, kernels.attend, q, memory_of(kv), given, work.which, softcap, known, (*results, doubt))
    if doubt[0]:
        selection.check_entries(rows, kv)
    lse, whole = torch.empty(count * units, width), torch.empty(count * units, width, dim)
    merge_pieces(*results, lse.numpy(), whole.numpy())
    return Partial(whole.view(count, heads, dim), lse.view(count, heads))


class _Work(NamedTuple):
    """The slots that each unit reads, as the kernel takes them, and how the reading is shared out.

    units: of a row; width: query heads of a unit; share: units of a KV head. parts: pieces of a unit.
    """

    seq: np.ndarray
    filled: np.ndarray
    low: np.ndarray
    high: np.ndarray
    which: tuple[Any, ...]
    units: int
    width: int
    share: int
    parts: int
    workers: int


def _work(rows: Rows, kv: KVView, selection: Selection, part: tuple[Bound, int] | None) -> _Work:
    (count, heads, _), group = rows.q.shape, kv.group(rows)
    if isinstance(selection, Spans) and selection.per == "query" and group > 1:
        same = _per_group(selection, group, *(part or ())[:1])
        if same is not None:
            ends = same[: 2 * len(selection.spans)]
            selection = Spans(tuple(Span(*pair) for pair in zip(ends[::2], ends[1::2], strict=True)), "kv")
            part = part if part is None else (same[-1], part[1])
    alone = head_axis(selection, part) > 1 and selection.per == "query"  # query heads of a group choose for themselves
    units, width = (heads, 1) if alone else (kv.heads, group)
    seq, filled = ints(rows.seq), ints(kv.seq_lens)
    filled = filled[seq]
    reach = np.maximum(np.minimum(filled, ints(rows.pos) + 1), 0)
    low, high = np.zeros((count, 1), np.int64), reach[:, None]
    if part is not None:
        cut = np.minimum(_slot(part[0], rows), high)
        low, high = (cut, high) if part[1] else (low, cut)
    spans = isinstance(selection, Spans)
    bounds = NO_SPANS
    begin, length, index, weight, weighted, block = NO_LISTS, NO_LISTS, NO_INDEX, NO_WEIGHT, False, 1
    if isinstance(selection, Spans):
        bounds = _slots(selection, rows, reach)
        if part is not None:
            bounds = np.clip(bounds, low[..., None, None], high[..., None, None])
    elif isinstance(selection, (Lists, PackedLists)):
        begin, length = _places(selection, count, units)
        index, block = np.ascontiguousarray(selection.index.numpy(), np.int32).reshape(-1), selection.block
        if selection.log_weight is not None:
            weight, weighted = floats(selection.log_weight).reshape(-1), True
    else:
        raise Unsupported(f"attend's Numba kernel takes spans and lists, got {type(selection).__name__}")
    which = (spans, bounds, index, weight, weighted, begin, length, block)
    workers, most = torch.get_num_threads(), 0
    if workers > 1 and count:
        if spans:
            most = int(np.maximum(bounds[:, :, 1] - bounds[:, :, 0], 0).sum(-1).max())
        else:
            most = int(np.where(length < 0, high.max(), length * block).max())
        if count * units * most < ALONE:
            workers = 1
    parts = count_parts(workers, count * units, most)
    return _Work(seq, filled, low, high, which, units, width, group if alone else 1, parts, workers)


def count_parts(workers: int, units: int, most: int) -> int:
    """Pieces that each of `units` streams of at most `most` keys is read in."""
    return max(1, min(-(-PIECES * workers // units), -(-most // LEAST))) if workers > 1 and units else 1


def add_sink(result: Partial, sink_logit: Tensor | None) -> Partial:
    if sink_logit is None:
        return result
    return merge(result, Partial(torch.zeros_like(result.out), sink_logit.float().expand_as(result.lse)))


def _per_group(spans: Spans, group: int, *bounds: Bound) -> tuple[Bound, ...] | None:
    """The bounds [R, KV heads or 1] where all query heads of each KV head have the same, so that keys are read once."""
    found = []
    for bound in (*(bound for span in spans.spans for bound in span), *bounds):
        if isinstance(bound.value, Tensor) and bound.value.shape[1] > 1:
            each = bound.value.unflatten(1, (-1, group))
            if not bool((each == each[..., :1]).all()):
                return None
            bound = Bound(each[..., 0], bound.relative)
        found.append(bound)
    return tuple(found)


def head_axis(selection: Selection, part: tuple[Bound, int] | None = None) -> int:
    """Entries of the head axis of the selection, after its head map, and of the bound that it is cut at."""
    if part is not None and isinstance(part[0].value, Tensor) and part[0].value.shape[1] > 1:
        return part[0].value.shape[1]
    if isinstance(selection, Spans):
        bounds = (bound.value for span in selection.spans for bound in span)
        return max((value.shape[1] for value in bounds if isinstance(value, Tensor)), default=1)
    assert isinstance(selection, (Lists, PackedLists))
    if selection.head_map is not None:
        return len(selection.head_map)
    return selection.index.shape[1] if isinstance(selection, Lists) else selection.heads


def _slot(bound: Bound, rows: Rows) -> np.ndarray:
    """int64 [R, 1 or heads], 0 for what lies before the first slot."""
    value = ints(bound.value) if isinstance(bound.value, Tensor) else np.full((1, 1), bound.value)
    at: np.ndarray = np.maximum(value + ints(rows.pos)[:, None] * bound.relative, 0)
    return at


def _slots(selection: Spans, rows: Rows, reach: np.ndarray) -> np.ndarray:
    """int64 [R, heads, 2, S]: start and stop of spans that do not overlap, cut to what a row reaches."""
    pairs = [(_slot(span.start, rows), _slot(span.stop, rows)) for span in selection.spans]
    heads = max((bound.shape[1] for pair in pairs for bound in pair), default=1)
    bounds = np.empty((len(reach), heads, 2, len(pairs)), np.int64)
    for i, (start, stop) in enumerate(pairs):
        bounds[:, :, 0, i], bounds[:, :, 1, i] = start, stop
    kernels.disjoint(bounds, reach)
    return bounds


def _places(selection: Lists | PackedLists, count: int, units: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [R * units]: where the list of a row and head begins in `index`, and its length, -1 where it overflowed."""
    of = np.arange(count) if selection.row_to_list is None else ints(selection.row_to_list)
    heads = selection.index.shape[1] if isinstance(selection, Lists) else selection.heads
    head = np.arange(units) if heads > 1 else np.zeros(units, np.int64)
    if selection.head_map is not None:
        head = np.broadcast_to(ints(selection.head_map), units)
    entry = (of[:, None] * heads + head).reshape(-1)
    if isinstance(selection, PackedLists):
        offsets = ints(selection.offsets)
        return offsets[entry], offsets[entry + 1] - offsets[entry]
    room = selection.index.shape[2]
    length = ints(selection.count).reshape(-1)[entry]
    return entry * room, np.where(length > room, -1, length)
