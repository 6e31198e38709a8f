"""The front door of attend: the same result whichever way it is asked for, and nothing wrong gets through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, SelectionError
from longreach.ops import KVView, Lists, Rows, Span, Spans, absolute, attend
from longreach.ops.attend import IMPLEMENTATIONS
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import exact_attend
from longreach.testing.tolerance import assert_close

META = torch.device("meta")


@pytest.fixture
def kv() -> KVView:
    return random_kv([7, 10], heads=2, dim=16)


@pytest.fixture
def rows(kv: KVView) -> Rows:
    return random_rows(kv, 5)


def test_auto_is_the_default_and_names_an_implementation(rows: Rows, kv: KVView) -> None:
    want = exact_attend(rows, kv, Spans.dense(), scale=0.5)
    assert_close(attend(rows, kv, Spans.dense(), scale=0.5), want)
    for impl in ("auto", IMPLEMENTATIONS.choose("auto", torch.device("cpu"))):
        assert_close(attend(rows, kv, Spans.dense(), scale=0.5, impl=impl), want)


def test_an_integer_scale_will_do(rows: Rows, kv: KVView) -> None:
    assert torch.equal(attend(rows, kv, Spans.dense(), scale=1).out, attend(rows, kv, Spans.dense(), scale=1.0).out)


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (torch.zeros(2), r"sink_logit: expected float \[H=4\] on cpu, got float32\[2\]"),
        (torch.zeros(4, 1), r"sink_logit: .* got float32\[4, 1\]"),
        (torch.zeros(4, dtype=torch.int64), "sink_logit: .* got int64"),
        (torch.zeros(4, device=META), "sink_logit: .* got .*meta"),
        (0.5, "sink_logit: .* got float"),
    ],
)
def test_sinks_that_do_not_fit(rows: Rows, kv: KVView, sink: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        attend(rows, kv, Spans.dense(), scale=1.0, sink_logit=sink)


def test_selections_are_checked_before_anything_is_read(rows: Rows, kv: KVView) -> None:
    with pytest.raises(SelectionError, match="absolute bounds must be >= 0"):
        attend(rows, kv, Spans((Span(absolute(-1), absolute(2)),)), scale=1.0)
    with pytest.raises(InvalidInput, match="lists: expected one per row"):
        attend(rows, kv, Lists(torch.zeros(4, 1, 1, dtype=torch.int64), torch.ones(4, 1).long()), scale=1.0)


@pytest.mark.parametrize("entries", [[10, 0], [-1, 0], [0, 0]])
def test_lists_out_of_range_or_twice(kv: KVView, entries: list[int]) -> None:
    rows = Rows(torch.zeros(2, 4, 16), torch.tensor([1, 1]), torch.tensor([9, 4]))
    index, two = torch.tensor([[[1, 0]], [entries]]), torch.full((2, 1), 2)
    with pytest.raises(SelectionError, match=r"sequence 1 .*row at position 4"):
        attend(rows, kv, Lists(index, two), scale=1.0)


def test_inputs_are_left_as_they_were(rows: Rows, kv: KVView) -> None:
    before = [x.clone() for x in (rows.q, rows.seq, rows.pos, kv.k, kv.v, kv.seq_lens)]
    attend(rows, kv, Spans.dense(), scale=1.0)
    for x, y in zip(before, (rows.q, rows.seq, rows.pos, kv.k, kv.v, kv.seq_lens), strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
