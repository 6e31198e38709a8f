"""The control."""

from __future__ import annotations

import torch

from longreach.methods.dense import Dense
from tests.methods.drive import read_text, slots_read, text


def test_every_row_reads_all_it_can_see_once() -> None:
    for turn in read_text(Dense(), text(12), chunks=[4, 5]):
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            (keys,), (values,) = outcome.reads.keys, outcome.reads.values
            seen = torch.arange(int(call.kv.filled[0])) <= call.rows.pos[:, None]
            assert torch.equal(slots_read(call, [keys]), seen[:, None].expand(-1, 2, -1)) and keys is values
            assert outcome.reads.metadata == 0 and outcome.dense_because is None
