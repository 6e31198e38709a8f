"""What the meter of a call says, row by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longreach.methods.call import LayerCall
from longreach.ops.doors import Later


class Metadata(NamedTuple):
    """Bytes of each row, and of all rows together; entries of lists, which selections say, are not among them."""

    rows: list[int]
    together: int


def passes_of(call: LayerCall, column: str) -> list[list[list[int]]]:
    """[R][G] of each pass over what `column` ("key_bytes", ...) counts: slots read, none for rows without a part in it.

    Where a kernel has counted slots, it counted what the selection says.
    """
    found = []
    for rows, kv, part, read in call.meter.noted:
        if read.selection is not None and getattr(read, column):
            slots = read.selection.keys_read(rows, kv)
            if isinstance(read.counted, int):
                assert read.counted == int(slots.sum())
            else:
                assert read.counted is None or torch.equal(read.counted.long(), slots)
            whole = torch.zeros(call.rows.pos.shape[0], kv.heads, dtype=torch.int64)
            found.append(whole.index_add_(0, torch.arange(len(whole)) if part is None else part, slots).tolist())
    return found


def metadata_of(call: LayerCall) -> Metadata:
    """The metadata that a call has read."""
    found, together = torch.zeros(call.rows.pos.shape[0], dtype=torch.int64), 0
    for rows, kv, part, read in call.meter.noted:
        mine = torch.zeros(rows.pos.shape[0], dtype=torch.int64)
        if read.selection is not None:
            mine += read.metadata_bytes * read.selection.keys_read(rows, kv).sum(1)
        other = read.other.now() if isinstance(read.other, Later) else read.other
        if isinstance(other, Tensor):
            mine += other.long().flatten(1).sum(1) if other.dim() > 1 else other.long()
        else:
            together += other
        found.index_add_(0, torch.arange(len(found)) if part is None else part, mine)
    return Metadata(found.tolist(), together)
