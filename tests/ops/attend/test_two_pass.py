"""The front doors of passes that keep logits: what they refuse beyond what attend refuses too (test_checks.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, SelectionError, UnknownName
from longreach.ops import KVView, Lists, Logits, Rows, Spans, attend_from_logits, attend_with_logits, score_keys
from longreach.testing.inputs import random_kv, random_rows

META = torch.device("meta")


@pytest.fixture
def kv() -> KVView:
    return random_kv([7, 10], heads=2, dim=16)


@pytest.fixture
def rows(kv: KVView) -> Rows:
    return random_rows(kv, 5)


@pytest.fixture
def kept(rows: Rows, kv: KVView) -> Logits:
    return score_keys(rows, kv, scale=0.3)[1]


def test_logits_of_other_rows_or_another_view(rows: Rows, kv: KVView, kept: Logits) -> None:
    fewer = rows.take(torch.arange(4))
    shorter = replace(kv, k=kv.k[:, :, :10], v=kv.v[:, :, :10])
    message = r"logits: expected those of these rows over this view, \[R, G, N, group\] = \["
    for r, k in ((fewer, kv), (rows, shorter)):
        with pytest.raises(InvalidInput, match=message):
            attend_from_logits(r, k, Spans.dense(), kept)
    with pytest.raises(InvalidInput, match=message + r".*on cpu, got .*meta"):
        attend_from_logits(rows, kv, Spans.dense(), Logits(kept.x.to(META)))
    wrong: Any = kept.x
    with pytest.raises(InvalidInput, match="logits: expected Logits, got float32"):
        attend_from_logits(rows, kv, Spans.dense(), wrong)


def test_sinks_and_selections_that_do_not_fit(rows: Rows, kv: KVView, kept: Logits) -> None:
    for op in (attend_with_logits, score_keys):
        with pytest.raises(InvalidInput, match=r"sink_logit: expected float \[H=4\] on cpu, got float32\[2\]"):
            op(rows, kv, scale=0.3, sink_logit=torch.zeros(2))
    with pytest.raises(InvalidInput, match="sink_logit: expected float"):
        attend_from_logits(rows, kv, Spans.dense(), kept, sink_logit=torch.zeros(2))
    nothing: Any = None
    with pytest.raises(InvalidInput, match="selection: expected a Selection, got NoneType"):
        attend_from_logits(rows, kv, nothing, kept)
    one = torch.ones(5, 1, dtype=torch.int64)
    with pytest.raises(SelectionError, match="entry 99 lies outside"):
        attend_from_logits(rows, kv, Lists(99 * one[..., None], one), kept)


def test_unknown_implementations_are_named(rows: Rows, kv: KVView, kept: Logits) -> None:
    with pytest.raises(UnknownName, match="unknown impl of attend_with_logits 'cuda'; known: auto, reference"):
        attend_with_logits(rows, kv, scale=0.3, impl="cuda")
    with pytest.raises(UnknownName, match="unknown impl of score_keys 'cuda'"):
        score_keys(rows, kv, scale=0.3, impl="cuda")
    with pytest.raises(UnknownName, match="unknown impl of attend_from_logits 'cuda'"):
        attend_from_logits(rows, kv, Spans.dense(), kept, impl="cuda")
