"""attend on a CPU, compiled by Numba: decode rows over spans and lists. It reads what the selection names, once."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.attend import numba_kernels as kernels
from longreach.ops.numba_math import flat, in_threads
from longreach.ops.partial import merge
from longreach.ops.selection import Bound, Lists, PackedLists, Selection, Spans
from longreach.ops.types import KVView, Partial, Rows

ROWS = 8  # of a sequence: a matrix product of all keys serves more of them better
LEAST = 512  # keys of a piece: fewer are not shared out among threads
PIECES = 4  # for each thread, where there are enough keys: threads that are done early take another one


def attend(
    rows: Rows, kv: KVView, selection: Selection, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> Partial:
    refuse(rows, kv, sink_logit, getattr(selection, "log_weight", None))
    count, heads, dim = rows.q.shape
    group = kv.group(rows)
    alone = _head_axis(selection) > 1 and selection.per == "query"  # query heads of a group choose for themselves
    units, width = (heads, 1) if alone else (kv.heads, group)
    reach = torch.minimum(kv.seq_lens[rows.seq.long()].long(), rows.pos.long() + 1).clamp(min=0)
    spans = isinstance(selection, Spans)
    start = stop = torch.zeros(1, 1, dtype=torch.int64)
    begin = length = torch.zeros(1, dtype=torch.int64)
    index, weight, block = torch.zeros(1, dtype=torch.int32), torch.zeros(1), 1
    weighted = False
    if isinstance(selection, Spans):
        start, stop = (x.expand(-1, units, -1).flatten(0, 1) for x in _slots(selection, rows, reach))
        most = (stop - start).clamp(min=0).sum(1)
    elif isinstance(selection, (Lists, PackedLists)):
        entry = _entry(selection, count, units)
        begin, length = _places(selection, entry.reshape(-1))
        index, block = selection.index.to(torch.int32).reshape(-1), selection.block
        if selection.log_weight is not None:
            weight, weighted = selection.log_weight.detach().float().reshape(-1), True
        most = torch.where(length < 0, reach.repeat_interleave(units), length * block)
    else:
        raise Unsupported(f"attend's Numba kernel takes spans and lists, got {type(selection).__name__}")
    q = (rows.q.detach().float() * scale).reshape(count * units, width, dim).contiguous()
    table = kv.seq_lens.new_zeros(1, 1) if kv.block_table is None else kv.block_table
    memory = (
        flat(kv.k), flat(kv.v), kv.k.stride()[:3], kv.v.stride()[:3], table.long().contiguous().numpy(),
        kv.block_table is not None, kv.page,
    )  # fmt: skip
    given = (rows.seq.long().contiguous().numpy(), reach.numpy(), units, group if alone else 1)
    which = (
        spans, start.contiguous().numpy(), stop.contiguous().numpy(), index.contiguous().numpy(),
        weight.contiguous().numpy(), weighted, begin.contiguous().numpy(), length.contiguous().numpy(), block,
    )  # fmt: skip
    workers, parts = torch.get_num_threads(), 1
    if workers > 1 and count:
        parts = max(1, min(-(-PIECES * workers // (count * units)), -(-int(most.max()) // LEAST)))
    top, total = torch.empty(2, count * units, parts, width).unbind()
    out = torch.empty(count * units, parts, width, dim)
    results = (top.numpy(), total.numpy(), out.numpy())
    in_threads(workers, kernels.attend, q.numpy(), memory, given, which, float(softcap or 0.0), results)
    lse, whole = torch.empty(count * units, width), torch.empty(count * units, width, dim)
    kernels.merge(*results, lse.numpy(), whole.numpy())
    result = Partial(whole.view(count, heads, dim), lse.view(count, heads))
    if sink_logit is None:
        return result
    return merge(result, Partial(torch.zeros_like(result.out), sink_logit.float().expand_as(result.lse)))


def _head_axis(selection: Selection) -> int:
    """Entries of the selection's head axis, after its head map."""
    if isinstance(selection, Spans):
        bounds = (bound.value for span in selection.spans for bound in span)
        return max((value.shape[1] for value in bounds if isinstance(value, Tensor)), default=1)
    assert isinstance(selection, (Lists, PackedLists))
    if selection.head_map is not None:
        return len(selection.head_map)
    return selection.index.shape[1] if isinstance(selection, Lists) else selection.heads


def _slots(selection: Spans, rows: Rows, reach: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [R, heads, S]: start and stop of spans that do not overlap, cut to what a row reaches."""

    def slot(bound: Bound) -> Tensor:
        value = bound.value if isinstance(bound.value, Tensor) else torch.full((1, 1), bound.value)
        return torch.minimum((value.long() + rows.pos.long()[:, None] * bound.relative).clamp(min=0), reach[:, None])

    ends = [slot(bound) for span in selection.spans for bound in span]
    if not ends:
        return torch.zeros(2, len(rows.pos), 1, 0, dtype=torch.int64).unbind()  # type: ignore[return-value]
    both = torch.stack(torch.broadcast_tensors(*ends), -1)
    start, stop = both[..., 0::2], both[..., 1::2]
    if len(selection.spans) > 1:
        start, order = start.sort(-1)
        stop = stop.gather(-1, order).cummax(-1).values
        start = torch.cat([start[..., :1], torch.maximum(start[..., 1:], stop[..., :-1])], -1)
    return start, stop


def _entry(selection: Lists | PackedLists, count: int, units: int) -> Tensor:
    """int64 [R, units]: the list that each row and head uses, counted list by list and head by head."""
    of = torch.arange(count) if selection.row_to_list is None else selection.row_to_list.long()
    heads = selection.index.shape[1] if isinstance(selection, Lists) else selection.heads
    head = torch.arange(units) if heads > 1 else torch.zeros(units, dtype=torch.int64)
    if selection.head_map is not None:
        head = selection.head_map.long().expand(units)
    return of[:, None] * heads + head


def _places(selection: Lists | PackedLists, entry: Tensor) -> tuple[Tensor, Tensor]:
    """int64 like `entry` [n]: where a list begins in `index`, and its length, -1 where it overflowed."""
    if isinstance(selection, PackedLists):
        offsets = selection.offsets.long()
        return offsets[entry], offsets[entry + 1] - offsets[entry]
    room = selection.index.shape[2]
    length = selection.count.long().reshape(-1)[entry]
    return entry * room, length.masked_fill(length > room, -1)


def suits(rows: Rows, kv: KVView, selection: Selection, sink_logit: Tensor | None) -> bool:
    """Whether this is the faster implementation on a CPU, and can compute it."""
    few = len(rows.pos) <= ROWS * len(kv.seq_lens)
    weight = getattr(selection, "log_weight", None)
    return few and fits(rows, kv, sink_logit, weight) is None


def fits(rows: Rows, kv: KVView, *tensors: Tensor | None) -> str | None:
    """Why these rows cannot be computed here; None if they can."""
    if rows.q.device.type != "cpu":
        return f"it runs on a CPU, got {rows.q.device}"
    if rows.q.dtype == torch.float64:
        return "it computes in fp32; for fp64 use impl='reference'"
    if kv.slot_pos is not None:
        return "it takes slots in the order of their positions; compact what was kept, or use impl='reference'"
    given = (rows.q, kv.k, kv.v, *tensors)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return "it has no backward pass and an input requires a gradient; use impl='reference', or torch.no_grad()"
    return None


def refuse(rows: Rows, kv: KVView, *tensors: Tensor | None) -> None:
    """Raise Unsupported for what the kernel cannot do and the reference can."""
    why = fits(rows, kv, *tensors)
    if why is not None:
        raise Unsupported(f"attend's Numba kernel: {why}")
