"""Whole problems drawn at random: rows, view, selection, and how logits are shaped."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from longreach.ops import KVView, Rows, Selection
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.selections import random_selection

LENGTHS = (0, 1, 2, 7, 16, 17, 31, 40)


@dataclass(frozen=True)
class Case:
    seed: int
    rows: Rows
    kv: KVView
    selection: Selection
    logits: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"make_case({self.seed})"


def make_case(seed: int) -> Case:
    """Any combination of what attend promises, small. One seed is one case, degenerate ones included."""
    dice = random.Random(seed)
    kv = random_kv(
        [dice.choice(LENGTHS) for _ in range(dice.choice((1, 2, 3)))],
        heads=dice.choice((1, 2, 3)),
        dim=dice.choice((8, 24, 40)),
        page=dice.choice((None, None, 1, 3, 16, 64)),
        memory=dice.choice(("plain", "packed", "tokens")),
        evicted=dice.random() < 0.4,
        dtype=dice.choice((torch.bfloat16, torch.float16, torch.float32)),
        ints=dice.choice((torch.int32, torch.int64)),
        seed=seed,
    )
    rows = random_rows(kv, dice.choice((0, 1, 2, 4, 5, 6)), group=dice.choice((1, 2, 3, 4)), seed=seed)
    selection = random_selection(
        dice.choice(("spans", "lists", "packed")), rows, kv, per=dice.choice(("kv", "query")), seed=seed
    )
    sink = torch.randn(rows.q.shape[1], generator=torch.Generator().manual_seed(seed))
    logits = {
        "scale": dice.choice((0.1, 0.35, 1.0)),
        "softcap": dice.choice((None, None, 1.5, 30.0)),
        "sink_logit": dice.choice((None, None, sink)),
    }
    return Case(seed, rows, kv, selection, logits)


cases = st.integers(0, 2**32 - 1).map(make_case)
