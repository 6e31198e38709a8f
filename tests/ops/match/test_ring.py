"""Rings and rules say what does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.ops import Rows
from longreach.ops.match import NOTES, Ring, Rule, match
from longreach.ops.match.triton_kernels import COLUMNS, DEPTH
from longreach.ops.rope import RotaryAngles

RULE = Rule(5, 2, 1.0)


def ring() -> Ring:
    return Ring.new(2, 2, (4, 8, 16), torch.empty(0))


def test_a_new_ring_holds_nothing() -> None:
    made = ring()
    assert (made.size, made.heads, made.kv_heads) == (8, 4, 2)
    assert bool((made.stamp == -1).all()) and not bool(made.arrivals.any())
    assert made.credit.dtype == torch.float32
    assert Ring.new(1, 1, (1, 1, 8), torch.empty(0, dtype=torch.float64)).credit.dtype == torch.float64
    assert Ring.new(1, 1, (1, 1, 8), torch.empty(0, dtype=torch.bfloat16)).query.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query": torch.zeros(2, 4, 8)}, r"query: expected float \[S, H, C, D\], got float32\[2, 4, 8\]"),
        ({"query": torch.zeros(2, 4, 8, 16).int()}, "query: expected float"),
        ({"stamp": torch.zeros(2, 8)}, r"stamp: expected int32 \[2, 8\], got float32"),
        ({"stamp": torch.zeros(2, 7).int()}, "stamp: expected"),
        ({"depth": torch.zeros(2, 4, 8).int()}, r"depth: expected int16 \[2, 4, 8\], got int32"),
        ({"credit": torch.zeros(2, 3, 8)}, r"credit: expected torch.float32 \[2, G, 8\], got float32\[2, 3, 8\]"),
        ({"credit": torch.zeros(2, 2, 8).double()}, "credit: expected"),
        ({"arrivals": torch.zeros(2, 2)}, r"arrivals: expected int32 \[2, 2\], got float32"),
        ({"stamp": torch.zeros(8, 2).int().T}, "stamp: expected contiguous memory"),
        ({"depth": torch.zeros(2, 4, 8, device="meta").short()}, "depth: expected on cpu like query, got .*meta"),
    ],
)
def test_a_ring_that_does_not_fit_together(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(ring(), **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "window: expected an int in"),
        ({"band": 0}, "band: expected"),
        ({"band": 2.5}, "band: .* got 2.5"),
        ({"sinks": -1}, "sinks: expected"),
        ({"near": 0}, "near: expected"),
        ({"far": 0}, "far: expected at least near=1, got 0"),
        ({"min_context": True}, "min_context: expected"),
        ({"rest": 0}, "rest: expected"),
        ({"deepest": 0}, "deepest: expected None or a count"),
        ({"deepest": 1 << 15}, "deepest: expected"),
        ({"limit": math.nan}, "limit: expected a number >= 0, got nan"),
        ({"limit": -1.0}, "limit: expected"),
        ({"patience": -1.0}, "patience: expected"),
        ({"reuses": -1.0}, "reuses: expected"),
        ({"price": "1"}, "price: expected"),
    ],
)
def test_a_rule_that_is_none(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(RULE, **wrong)


def test_kernels_know_the_notes() -> None:
    assert len(NOTES) == COLUMNS.value and NOTES[DEPTH.value] == "depth_0"


def rows(count: int = 2, **wrong: Any) -> Rows:
    given: dict[str, Any] = {"q": torch.randn(count, 4, 16), "seq": torch.arange(count), "pos": torch.arange(count)}
    return Rows(**(given | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": None}, "rows: expected Rows, got NoneType"),
        ({"rows": rows(q=torch.randn(2, 2, 16))}, "rows: expected queries like the ring's float32"),
        ({"rows": rows(q=torch.randn(2, 4, 16).half())}, "rows: expected queries like"),
        ({"rows": rows(seq=torch.tensor([1, 1]))}, "rows: expected one of each sequence at most, got several of one"),
        ({"rule": None}, "rule: expected a Rule, got NoneType"),
        ({"rule": replace(RULE, window=8)}, "window: expected less than the ring's 8 rows, got 8"),
        ({"slots": torch.tensor([0, 2])}, r"slots: expected in \[0, 2\), got 0 to 2"),
        ({"slots": torch.tensor([0.0])}, r"slots: expected int \[B\]"),
        ({"ring": None}, "ring: expected a Ring"),
        ({"rotary": RotaryAngles(torch.ones(3, 8), torch.zeros(3, 8))}, r"rotary.cos: expected \[R=2, pairs\]"),
        ({"rotary": RotaryAngles(torch.ones(2, 8), torch.zeros(2, 7))}, r"rotary.sin: expected \[R=2, pairs\]"),
        ({"weight": torch.ones(4, 8)}, r"weight: expected float \[H=4, D=16\]"),
        ({"weight": torch.ones(4, 16).int()}, "weight: expected float"),
    ],
)
def test_a_match_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"rows": rows(), "slots": torch.arange(2), "ring": ring(), "rule": RULE} | wrong
    with pytest.raises(InvalidInput, match=message):
        match(**given)
