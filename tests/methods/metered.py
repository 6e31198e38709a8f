"""What the meter of a call says of metadata, row by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longreach.methods.call import LayerCall


class Metadata(NamedTuple):
    """Bytes of each row, and of all rows together; entries of lists, which selections say, are not among them."""

    rows: list[int]
    together: int


def metadata_of(call: LayerCall) -> Metadata:
    """The metadata that a call has read. Where a kernel has counted slots, it counted what the selection says."""
    found, together = torch.zeros(call.rows.pos.shape[0], dtype=torch.int64), 0
    for rows, kv, part, read in call.meter.noted:
        mine = torch.zeros(rows.pos.shape[0], dtype=torch.int64)
        if read.selection is not None:
            slots = read.selection.reads(rows, kv)
            assert read.counted is None or torch.equal(read.counted.long(), slots)
            mine += read.metadata_bytes * slots.sum(1)
        if isinstance(read.other, Tensor):
            mine += read.other.long().flatten(1).sum(1) if read.other.dim() > 1 else read.other.long()
        else:
            together += read.other
        found.index_add_(0, torch.arange(len(found)) if part is None else part, mine)
    return Metadata(found.tolist(), together)
