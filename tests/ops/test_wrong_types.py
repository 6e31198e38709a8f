"""Arguments of another type altogether are refused in words, not by an attribute that is missing."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.ops import Spans, attend, merge, pooled_scores, remove
from longreach.testing.inputs import random_kv, random_rows


@pytest.mark.parametrize("selection", [None, "dense", 3])
def test_a_selection_of_another_type(selection: Any) -> None:
    kv = random_kv([5])
    with pytest.raises(InvalidInput, match="selection: expected a Selection, got"):
        attend(random_rows(kv, 2), kv, selection, scale=0.3)


def test_rows_and_view_of_another_type() -> None:
    kv = random_kv([5])
    rows: Any = random_rows(kv, 2)
    nothing: Any = None
    for op in (lambda r, k: attend(r, k, Spans.dense(), scale=0.3), lambda r, k: pooled_scores(r, k, scale=0.3)):
        with pytest.raises(InvalidInput, match="kv: expected a KVView, got NoneType"):
            op(rows, nothing)
        with pytest.raises(InvalidInput, match="rows: expected Rows, got NoneType"):
            op(nothing, kv)


@pytest.mark.parametrize("op", [merge, remove])
def test_partials_of_another_type(op: Any) -> None:
    with pytest.raises(InvalidInput, match="expected a Partial, got int"):
        op(1, 2)
