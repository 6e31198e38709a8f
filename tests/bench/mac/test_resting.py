"""The share of rows that rest is what match's own accounts come to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from longreach.bench.mac.resting import resting_share
from longreach.ops import Rows
from longreach.ops.match import NOTES, Ring, Rule, match

GROUP, GAP, CONTEXT = 2, 2, 200
RULE = Rule(window=4, band=1, limit=0.5, patience=3.0, rest=5, price=12.0)


def matched(rate: float, rule: Rule) -> float:
    """The same, by match: contexts are long and alike from row to row, so that each row earns the same."""
    sequences, steps = 40, 60
    draw = torch.Generator().manual_seed(1)
    ring = Ring.new(sequences, 1, (GROUP, 8, 8), torch.empty(0))
    ring.credit.fill_(rule.patience)
    rested = 0.0
    seq = torch.arange(sequences)
    for step in range(steps):
        pos = torch.full((sequences,), CONTEXT - 1 - steps // 2 + step)
        before = torch.arange(int(pos[0]) - 4, int(pos[0]))
        ring.stamp[:, before % 8] = before.int()
        ring.query[:] = 100.0
        q = torch.zeros(sequences, GROUP, 8)
        hit = torch.rand(sequences, GROUP, generator=draw) < rate
        ring.query[:, :, (int(pos[0]) - GAP) % 8] = torch.where(hit, 0.0, 100.0)[..., None]
        notes = match(Rows(q, seq, pos), seq, ring, rule).notes
        rested += float(notes[:, 0, NOTES.index("resting")].mean()) if step >= steps // 2 else 0.0
    return rested / (steps - steps // 2)


@pytest.mark.covering
@pytest.mark.parametrize("rate", [0.4, 0.0, 1.0])
@pytest.mark.parametrize("reuses", [0.0, 2.0])
def test_accounts_are_those_of_match(rate: float, reuses: float) -> None:
    rule = replace(RULE, reuses=reuses)
    assert resting_share(rule, rate, GROUP, CONTEXT, GAP) == pytest.approx(matched(rate, rule), abs=0.06)


def test_accounts_that_hold_more_rest_less() -> None:
    shares = [resting_share(replace(RULE, reuses=reuses), 0.5, GROUP, CONTEXT, GAP) for reuses in (0.0, 4.0)]
    assert shares[1] < shares[0] / 2


def test_nothing_ever_found_rests_but_for_one_search() -> None:
    assert resting_share(RULE, 0.0, GROUP, CONTEXT, GAP) == pytest.approx(5 / 6, abs=0.01)
    assert resting_share(replace(RULE, patience=math.inf), 0.0, GROUP, CONTEXT, GAP) == 0
