"""The profit guard with MAC's numbers at 128K tokens: who reuses seldom, but often enough to pay, is left alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longreach.methods.mac import MAC
from longreach.ops import Rows
from longreach.ops.match import NOTES, Ring, Rule, match

CONTEXT, WINDOW, KV_HEADS = 1 << 17, 4, 64


def rule() -> Rule:
    """Of 32 query heads, 8 KV heads of 128 channels in bf16. What is looked through is dearer, and so less of it."""
    made = MAC()._rule(0, None, 4, torch.empty(1, 8, 1, 128, dtype=torch.bfloat16))
    return replace(made, window=WINDOW, price=made.price * made.window / WINDOW, deepest=None)


def worth(of: Rule) -> float:
    """What one reuse of the whole context saves, in searches: Eq. 9 is at one reuse in so many."""
    return CONTEXT / (of.window * of.price)


def resting(of: Rule, hits: Tensor) -> Tensor:
    """[rows, KV heads]: who rested, in match's own account. hits: bool [rows, KV heads], who would find a row."""
    ring = Ring.new(1, KV_HEADS, (KV_HEADS, 16, 8), torch.empty(0))
    one, found = torch.zeros(1, dtype=torch.int64), []
    for step, hit in enumerate(hits):
        pos = CONTEXT + step
        if step == 0:  # the rows before are known, and of their accounts nothing
            ring.stamp[0, torch.arange(pos - 8, pos - 1) % 16] = torch.arange(pos - 8, pos - 1).int()
        ring.query.fill_(100.0)
        ring.query[0, :, (pos - 2) % 16] = torch.where(hit, 0.0, 100.0)[:, None]
        row = Rows(torch.zeros(1, KV_HEADS, 8), one, torch.tensor([pos]))
        found.append(match(row, one, ring, of, impl="reference").notes[0, :, NOTES.index("resting")])
    return torch.stack(found)


@pytest.mark.sweep  # chance, over many rows
def test_twice_the_rate_that_pays_is_left_alone() -> None:
    """A row in 32 reuses: runs of 17 and more misses are the rule, and cost less than the reuses between them save."""
    of = rule()
    assert 60 < worth(of) < 66
    draw = torch.Generator().manual_seed(0)
    hits = torch.rand(3000, KV_HEADS, generator=draw) < 2 / worth(of)
    assert float(resting(of, hits).mean()) < 0.10
    assert float(resting(replace(of, reuses=0.0), hits).mean()) > 0.5, "without what reuses earn it would not be"


def test_who_never_reuses_rests_nearly_always_and_soon() -> None:
    of = rule()
    rests = resting(of, torch.zeros(1200, KV_HEADS, dtype=torch.bool))
    soon = math.ceil(of.reuses * (CONTEXT + 300) / (of.window * of.price)) + 2
    assert soon < 300 and not bool(rests[: soon - 5].any()) and bool(rests[soon].all())
    assert float(rests[soon:].mean()) == pytest.approx(64 / 65, abs=0.01)


def test_who_stops_reusing_rests_as_soon_however_long_it_reused() -> None:
    of = rule()
    hits = torch.ones(900, KV_HEADS, dtype=torch.bool)
    hits[400:] = False
    rests = resting(of, hits)
    assert not bool(rests[:640].any()) and bool(rests[660].all())


@pytest.mark.sweep  # chance, over many rows
def test_half_the_rate_that_pays_rests_nearly_always() -> None:
    of = rule()
    hits = torch.rand(4000, KV_HEADS, generator=torch.Generator().manual_seed(1)) < 0.5 / worth(of)
    assert float(resting(of, hits)[2000:].mean()) > 0.9
