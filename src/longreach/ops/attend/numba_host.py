"""attend by the CPU for rows on a GPU, over keys and values in host memory: within a captured graph, or outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.attend.numba import add_sink, count_parts, head_axis
from longreach.ops.attend.numba_host_kernels import JOB, program_for, work_bytes
from longreach.ops.numba_host_inputs import FLOAT, kind_of, refuse_gradients, run_program, send_lists
from longreach.ops.selection import Lists, Selection, Spans
from longreach.ops.types import KVView, Partial, Rows

MOST_SPANS = 32


def attend(
    rows: Rows, kv: KVView, selection: Selection, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> Partial:
    """Queries and lists go to host memory, the CPU attends, and its result comes back, in the order of the stream."""
    calls = kv.calls
    assert calls is not None
    refuse_gradients("attend", rows, kv, sink_logit, getattr(selection, "log_weight", None))
    count, heads, dim = rows.q.shape
    alone = head_axis(selection) > 1 and selection.per == "query"  # query heads of a group choose for themselves
    units, width = (heads, 1) if alone else (kv.heads, kv.group(rows))
    out, lse = rows.q.new_empty(rows.q.shape, dtype=FLOAT), rows.q.new_empty((count, heads), dtype=FLOAT)
    if count:
        fields: dict[str, Any] = {}
        small: list[tuple[str, Tensor]] = []
        if isinstance(selection, Spans):
            values, more = _bounds(selection, rows)
            small.append(("values", values))
            fields |= more
            most = kv.capacity
        elif isinstance(selection, Lists):
            more, most = _lists(selection, count, units, small)
            fields |= send_lists(calls, selection.index, selection.log_weight, selection.count) | more
        else:
            raise Unsupported(f"attention on the CPU takes spans and lists, got {type(selection).__name__}")
        workers = torch.get_num_threads()
        parts = count_parts(workers, count * units, most)
        fields |= {
            "units": units, "width": width, "mine": kv.group(rows) if alone else 1, "parts": parts,
            "work": calls.scratch("attend", work_bytes(count, units, width, dim, parts)), "scale": scale,
            "softcap": softcap or 0.0,
        }  # fmt: skip
        program = program_for(kind_of(kv.k.dtype))
        run_program(program, JOB, workers, rows, kv, small, fields, {"out": out, "lse": lse})
    return add_sink(Partial(out, lse), sink_logit)


def _bounds(selection: Spans, rows: Rows) -> tuple[Tensor, dict[str, int]]:
    """int64 [R, heads, 2, S], start and stop of the spans, and a job's fields on them."""
    ends = [[span.start for span in selection.spans], [span.stop for span in selection.spans]]
    if len(selection.spans) > MOST_SPANS:
        raise Unsupported(f"attention on the CPU takes up to {MOST_SPANS} spans, got {len(selection.spans)}")
    tensors = [bound.value for side in ends for bound in side if isinstance(bound.value, Tensor)]
    heads, count, device = max((x.shape[1] for x in tensors), default=1), len(rows.pos), rows.q.device
    values = torch.empty(count, heads, 2, len(selection.spans), dtype=torch.int64, device=device)
    for end, side in enumerate(ends):
        for s, bound in enumerate(side):
            if isinstance(bound.value, Tensor):
                values[:, :, end, s] = bound.value
            else:
                values[:, :, end, s].fill_(bound.value)
    start, stop = (sum(int(bound.relative) << s for s, bound in enumerate(side)) for side in ends)
    shape = {"bound_heads": heads, "bound_count": len(selection.spans)}
    return values, {"spans": 1, **shape, "from_start": start, "from_stop": stop}


def _lists(
    selection: Lists, rows: int, units: int, small: list[tuple[str, Tensor]]
) -> tuple[dict[str, int], int]:  # fmt: skip
    """Fields of a job on the lists' shape, and the most keys of one. Adds the tensors to be sent to `small`."""
    entries, lists, room = selection.index.shape
    device = selection.index.device
    of, heads = selection.row_to_list, selection.head_map
    if of is None:
        of = torch.arange(rows, device=device)
    if heads is None:
        heads = torch.arange(units, device=device) if lists > 1 else torch.zeros(1, dtype=torch.int64, device=device)
    small += [("row_to_list", of.long()), ("head_map", heads.long().expand(units))]
    shape = {"entries": entries, "lists": lists, "room": room, "block": selection.block}
    return {**shape, "weighted": int(selection.log_weight is not None)}, room * selection.block
