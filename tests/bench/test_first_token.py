"""The group "first-token": a prompt read densely and by Kascade, and what a plan of the prompt takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.bench import first_token
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.decoding import Decoding
from longreach.bench.first_token import run_first_token

CASE = replace(tiny(CASES["first-token-32k"]), replays=3, targets=CASES["first-token-32k"].targets)


@pytest.fixture
def bench() -> Decoding:
    return Decoding(torch.device("cpu"), without=(), quick=True, seed=0, say=lambda line: None)


def test_both_sides_and_the_plan_have_times(bench: Decoding) -> None:
    saved: list[dict[str, Any]] = []
    result = run_first_token(bench, CASE, saved.append)
    assert [entry["name"] for entry in result["entries"]] == ["dense", "kascade"]
    for entry in result["entries"]:
        assert len(entry["microseconds"]["replays"]) == 3 and min(entry["microseconds"]["replays"]) > 0
        assert entry["error"] is None and entry["unchecked"]
    dense, kascade = (entry["microseconds"]["median"] for entry in result["entries"])
    speed, memory = result["targets"]
    assert speed["got"] == pytest.approx(dense / kascade) and memory["got"] is None, "a CPU tells no peak"
    plan = result["automatic_plan"]
    assert plan["seconds"] is plan["share_of_dense"] is None and "2048 are needed" in plan["about"]
    assert len(saved) == 1 and "automatic_plan" not in saved[0]


def test_a_plan_of_a_prompt_that_is_long_enough(bench: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.methods.kascade.automatic.fewest_anchors", lambda layers: 1)  # of a random model
    case = replace(CASE, shape=replace(CASE.shape, context=2050, rows=1), prefill_chunk=None)
    result = run_first_token(bench, case, lambda result: None)
    plan, dense = result["automatic_plan"], result["entries"][0]["microseconds"]["median"]
    assert plan["share_of_dense"] == pytest.approx(1e6 * plan["seconds"] / dense) and plan["seconds"] > 0


def test_a_wrong_first_token_has_no_time(bench: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    real = first_token._first_token

    def wrong(*given: Any) -> Any:
        took, most, token = real(*given)
        return took, most, (token + 1) % 264

    monkeypatch.setattr(first_token, "_first_token", wrong)
    with pytest.raises(WrongResult, match="behind the best"):
        run_first_token(bench, CASE, lambda result: None)
