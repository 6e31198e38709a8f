"""What all passes over keys refuse alike: rows and views that do not fit, memory that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName
from longreach.ops import KVView, Rows, Spans, attend, attend_with_logits, pooled_scores, score_keys
from longreach.testing.inputs import random_kv, random_rows

META = torch.device("meta")
Op = Callable[..., Any]


def densely(rows: Rows, kv: KVView, **more: Any) -> Any:
    return attend(rows, kv, Spans.dense(), **{"scale": 1.0, **more})


def scored(rows: Rows, kv: KVView, **more: Any) -> Any:
    return pooled_scores(rows, kv, **{"scale": 1.0, **more})


def keeping(rows: Rows, kv: KVView, **more: Any) -> Any:
    return attend_with_logits(rows, kv, **{"scale": 1.0, **more})


def scoring(rows: Rows, kv: KVView, **more: Any) -> Any:
    return score_keys(rows, kv, **{"scale": 1.0, **more})


both = pytest.mark.parametrize("op", [densely, scored, keeping, scoring])


@pytest.fixture
def kv() -> KVView:
    return random_kv([7, 10], heads=2, dim=16, page=4)


@pytest.fixture
def rows(kv: KVView) -> Rows:
    return random_rows(kv, 5)


@both
def test_what_fits_is_taken(op: Op, rows: Rows, kv: KVView) -> None:
    op(rows, kv)


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 4, 8)}, "head dim: q has 8, k has 16"),
        ({"q": torch.zeros(5, 4, 16).bfloat16()}, "dtype: q is bfloat16.*k is float32"),
        ({"q": torch.zeros(5, 3, 16)}, "3 query heads must be 1 to 128 times the 2 KV heads"),
        ({"seq": torch.tensor([0, 0, 2, 0, 0])}, r"seq: expected in \[0, B=2\), got 0 to 2"),
        ({"seq": torch.tensor([0, 0, 1, 0, -1])}, "got -1 to 1"),
    ],
)
def test_rows_that_do_not_fit(op: Op, rows: Rows, kv: KVView, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        op(replace(rows, **change), kv)


@both
def test_rows_on_another_device(op: Op, rows: Rows, kv: KVView) -> None:
    away = Rows(rows.q.to(META), rows.seq.to(META), rows.pos.to(META))
    with pytest.raises(InvalidInput, match="device: q is on meta, k on cpu"):
        op(away, kv)


@both
@pytest.mark.parametrize(("filled", "message"), [([7, 17], "got 7 to 17"), ([-1, 10], "got -1 to 10")])
def test_more_is_filled_than_there_is(op: Op, rows: Rows, kv: KVView, filled: list[int], message: str) -> None:
    with pytest.raises(InvalidInput, match=r"seq_lens: expected in \[0, 16\], the slots .*" + message):
        op(rows, replace(kv, seq_lens=torch.tensor(filled)))


@both
@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1])
def test_the_table_names_a_page_that_is_not_there(op: Op, rows: Rows, kv: KVView, page: int) -> None:
    assert kv.block_table is not None and kv.k.shape[0] == 8
    table = kv.block_table.clone()
    table[1, 2] = page
    with pytest.raises(InvalidInput, match=rf"block_table: expected pages in \[0, P=8\), got {page} for page 2 of seq"):
        op(rows, replace(kv, block_table=table))
    op(rows, replace(kv, block_table=table, seq_lens=torch.tensor([7, 8])))  # not in use, not looked at


@both
@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
        ({"scale": float("inf")}, "scale: .* got inf"),
        ({"scale": torch.tensor(1.0)}, "scale: .* got tensor"),
        ({"scale": None}, "scale: .* got None"),
        ({"softcap": 0.0}, "softcap: expected None or a finite number > 0, got 0.0"),
        ({"softcap": -3}, "softcap: .* got -3"),
        ({"softcap": float("inf")}, "softcap: .* got inf"),
        ({"softcap": "50"}, "softcap: .* got '50'"),
    ],
)
def test_logits_that_make_no_sense(op: Op, rows: Rows, kv: KVView, logits: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        op(rows, kv, **logits)


@both
def test_unknown_implementations(op: Op, rows: Rows, kv: KVView) -> None:
    with pytest.raises(
        UnknownName,
        match=r"unknown impl of (attend|pooled_scores|attend_with_logits|score_keys) 'cuda'; known: auto, reference",
    ):
        op(rows, kv, impl="cuda")
