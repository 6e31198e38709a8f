"""The rows of a prefill pass that a ring may still hold when the prompt is read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longreach.methods.call import LayerCall
from longreach.ops import RowRange, Rows


def last_rows(call: LayerCall, size: int) -> LayerCall | None:
    """The call with the rows that a ring of `size` rows may still hold when the prompt is read; None for no row.

    Known later tokens push rows out before anything is matched. If the number of later tokens is unknown, every pass
    keeps its last `size` rows, and the next pass pushes them out. Then each pass attends again for up to `size` rows;
    a pass no longer than the ring does all its attention twice.
    """
    keep = size - call.prompt_tokens_left
    if keep <= 0 or not call.rows.q.shape[0]:
        return None
    index, runs = call.once(("last rows", keep), lambda: _index(call.rows, call.kv.seq_lens, keep))
    if index is None:
        return call
    some = call.take(index)
    return replace(some, rows=replace(some.rows, runs=runs)) if index.numel() else None


def _index(rows: Rows, seq_lens: Tensor, keep: int) -> tuple[Tensor | None, tuple[RowRange, ...] | None]:
    """The last `keep` rows of each sequence and their runs; None for all rows. seq_lens: [B], with the rows counted."""
    if rows.runs is None or any(
        run.first is None and run.rows > 1 for run in rows.runs
    ):  # positions are on the device only
        return (rows.pos.long() >= seq_lens[rows.seq.long()].long() - keep).nonzero()[:, 0], None
    if all(run.rows <= keep for run in rows.runs):
        return None, rows.runs
    parts, runs, start = [], [], 0
    for run in rows.runs:
        kept = min(run.rows, keep)
        skipped = run.rows - kept
        parts.append(torch.arange(start + skipped, start + run.rows))
        runs.append(RowRange(kept, run.seq, None if run.first is None else run.first + skipped))
        start += run.rows
    return torch.cat(parts).to(rows.pos.device), tuple(runs)
