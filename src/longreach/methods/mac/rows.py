"""Which rows of a pass over a prompt will be in the ring when it is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longreach.methods.base import LayerCall
from longreach.ops import Rows, Run, Span, Spans, at


@dataclass(frozen=True)
class Kept:
    """The rows of a pass that a ring may hold: the call with them alone, and which of all rows they are, None: all."""

    call: LayerCall
    index: Tensor | None

    def among(self, rows: Rows, span: Span) -> Spans:
        """What these rows read of a span, said of all `rows` of the pass: the others' begin past their own keys."""
        if self.index is None:
            return Spans((span,))
        start = (rows.pos + 1)[:, None]
        first = span.start.value
        start[self.index] = first if isinstance(first, int) else first[self.index]
        return Spans((Span(at(start), span.stop),))


def last_rows(call: LayerCall, size: int) -> Kept | None:
    """Those of the call's rows that a ring of `size` rows may hold once the prompt is read; None for none.

    Tokens that are known to follow push rows out before anything is matched. Where it is not known how many follow, the
    last `size` rows of every pass are kept, and are pushed out by the next one's: then each pass attends once more for
    up to `size` rows, as much again as its own attention where it is no longer than the ring.
    """
    keep = size - call.ahead
    if keep <= 0 or not call.rows.q.shape[0]:
        return None
    place = ("rows that a ring keeps", keep)  # alike in all layers of a pass
    if place not in call.passed:
        call.passed[place] = _index(call.rows, call.kv.filled, keep)
    index, runs = call.passed[place]
    if index is None:
        return Kept(call, None)
    some = call.take(index)
    return Kept(replace(some, rows=replace(some.rows, runs=runs)), index) if index.numel() else None


def _index(rows: Rows, filled: Tensor, keep: int) -> tuple[Tensor | None, tuple[Run, ...] | None]:
    """The last `keep` rows of each sequence and their runs; None for all rows. filled: [B], with the rows counted."""
    if rows.runs is None:  # only the device knows
        return (rows.pos.long() >= filled[rows.seq.long()].long() - keep).nonzero()[:, 0], None
    if all(run.rows <= keep for run in rows.runs):
        return None, rows.runs
    parts, runs, start = [], [], 0
    for run in rows.runs:
        kept = min(run.rows, keep)
        skipped = run.rows - kept
        parts.append(torch.arange(start + skipped, start + run.rows))
        runs.append(Run(kept, run.seq, None if run.first is None else run.first + skipped))
        start += run.rows
    return torch.cat(parts).to(rows.pos.device), tuple(runs)
