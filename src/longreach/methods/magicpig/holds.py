"""The sequences of a call, with their lengths on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

from longreach.methods.call import LayerCall


class Hold(NamedTuple):
    """A sequence that has rows in a call. seq: its number in the view; slot: in the cache; row: its row at the last
    position. before: tokens that come before its first row; after: tokens with those of the pass.
    """

    seq: int
    slot: int
    row: int
    before: int
    after: int


def holds_of(call: LayerCall) -> tuple[Hold, ...]:
    """Each sequence of the rows once. Computed once a pass; on a GPU that waits for the device."""
    return call.once("magicpig: sequences", lambda: _holds(call))


def _holds(call: LayerCall) -> tuple[Hold, ...]:
    seq, pos, lengths = call.rows.seq.long(), call.rows.pos.long(), call.kv.seq_lens.long()
    first = lengths.clone().scatter_reduce_(0, seq, pos, "amin")
    last = torch.full_like(lengths, -1).scatter_reduce_(0, seq, pos, "amax")
    row = torch.full_like(lengths, -1).scatter_reduce_(
        0, seq, torch.where(pos == last[seq], torch.arange(len(pos), device=pos.device), -1), "amax"
    )
    columns = torch.stack([call.slots.long(), row, first, lengths]).tolist()
    return tuple(Hold(b, *each) for b, each in enumerate(zip(*columns, strict=True)) if each[1] >= 0)
