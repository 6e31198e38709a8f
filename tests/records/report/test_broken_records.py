"""Records with anything in them: refused in words or reported, never a crash."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.records.report import (
    attention_figures,
    depth,
    fidelity,
    fused,
    fusion_figures,
    perplexity,
    report,
    routing,
    sampling_figures,
    scores,
)
from tests.records.report import factory

ANYTHING = [
    None, 0, -1, 2.5, 1e300, 1e-300, 10**400, float("nan"), float("inf"), "", "$", "_", "\ud800", "a|\n`<b>", [], {},
    [[]], [1], True, {"a": 1},
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, inner in inside for p in [(*at, key), *places(inner, (*at, key))]]


@pytest.mark.parametrize(
    "content",
    [
        factory.small(),
        factory.sweep(1024),
        factory.perplexity(),
        factory.fidelity(2, 2, 4),
        factory.attention(),
        factory.fused(),
        factory.fusion(),
        factory.sampling(),
        factory.routing(),
    ],
)
def test_no_record_is_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any]) -> None:
    for module in (
        attention_figures,
        depth,
        fidelity,
        fused,
        fusion_figures,
        perplexity,
        routing,
        sampling_figures,
        scores,
    ):  # pictures of odd numbers have their own tests
        for drawing in ("maps", "curves", "points", "layer_curves"):
            monkeypatch.setattr(module, drawing, lambda *a: b"png", raising=False)
    random, everywhere, taken = Random(0), places(content), 0
    for _ in range(120):
        broken = copy.deepcopy(content)
        *way, last = random.choice(everywhere)
        inside: Any = broken
        for key in way:
            inside = inside[key]
        value = random.choice(ANYTHING)
        if isinstance(inside, dict) and random.random() < 0.2:
            inside["a|\n`<b>$\ud800"] = inside.pop(last)
        else:
            inside[last] = value
        try:
            report([factory.save(tmp_path, broken)], tmp_path / "out")
            taken += 1
        except InvalidInput as error:
            assert "record.json" in str(error)
    assert 5 < taken < 115
