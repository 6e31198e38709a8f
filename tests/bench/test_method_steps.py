"""The group "steps": every method's step from the same keys, each checked, kept as it is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.bench import method_steps
from longreach.bench.cases import CASES, METHODS, tiny
from longreach.bench.check import WrongResult
from longreach.bench.decoding import Decoding
from longreach.bench.method_steps import run_method_steps
from longreach.errors import InvalidInput, OutOfMemory
from longreach.methods.quest import Quest
from longreach.methods.registry import method_class, names

CASE = tiny(CASES["steps-8k-b1"])
STEPS = [case for case in CASES.values() if case.group == "steps"]


def run(methods: tuple[str, ...], saved: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    bench = Decoding(torch.device("cpu"), without=(), quick=True, seed=0, say=lambda line: None)
    bench.steps = 2
    keep = (lambda result: None) if saved is None else saved.append
    return run_method_steps(bench, replace(CASE, methods=methods), keep)


def test_every_decode_method_is_measured_and_what_must_be_reached() -> None:
    captured = {name for name in names("decode") if method_class(name).capture == "full"}
    # magicpig samples next to nothing of random keys, so such a step would show less than its cost; no record
    # holds block_mka yet
    assert set(METHODS) == captured - {"magicpig", "block_mka"}
    assert {(case.shape.batch, case.shape.context) for case in STEPS} == {
        (batch, context << 10) for batch in (1, 4) for context in (8, 32, 128)
    }
    bounds = {case.name: {t.of: t.bound for t in case.targets} for case in STEPS if case.shape.batch == 1}
    assert bounds["steps-8k-b1"] == {"streaming_llm": 1.0, "less_is_more": 1.0}
    assert bounds["steps-32k-b1"] == dict.fromkeys(METHODS[1:], 1.0)
    assert bounds["steps-128k-b1"] == {
        **dict.fromkeys(METHODS[1:], 1.0), "streaming_llm": 0.75, "quest": 0.85, "loki": 0.95,
    }  # fmt: skip
    assert all((t.quantity, t.over) == ("time over", "dense") for case in STEPS for t in case.targets)


def test_every_method_has_an_entry_with_its_error_and_bound() -> None:
    saved: list[dict[str, Any]] = []
    result = run(METHODS, saved)
    assert [entry["name"] for entry in result["entries"]] == list(METHODS)
    assert [len(partial["entries"]) for partial in saved] == [1, 2, 3, 4, 5, 6, 7, 8]
    for entry in result["entries"]:
        assert 0 < entry["error"] <= entry["error_bound"], entry["name"]
        assert {"before", "decode_peak"} == set(entry["memory"]) and "kernels" in entry["launched"]
        assert "plan" not in entry["settings"].get("method", {})
    shares = {entry["name"]: entry["settings"].get("keys_and_values_read") for entry in result["entries"]}
    assert shares.pop("dense") is None and all(0 < share < 1.2 for share in shares.values())
    assert set(result["check"]) == set(METHODS) and "Hits are forced" in result["forced"]["mac"]
    assert all(check["layers"] == 4 for name, check in result["check"].items() if name not in ("dense", "mac"))


def test_a_method_that_is_wrong_or_does_not_fit_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made = method_steps.method_for

    def small(name: str, *args: Any, **options: Any) -> Any:
        if name == "omnikv":
            raise OutOfMemory("too large")
        return made(name, *args, **options)

    monkeypatch.setattr(method_steps, "method_for", small)
    result = run(("dense", "omnikv", "streaming_llm"))
    assert [entry["name"] for entry in result["entries"]] == ["dense", "streaming_llm"]
    assert result["left_out"] == {"omnikv": "out of memory: too large"}

    attend = Quest.run
    monkeypatch.setattr(Quest, "run", lambda self, call, state: (o := attend(self, call, state))._replace(
        partial=replace(o.partial, out=o.partial.out * 1.001)
    ))  # fmt: skip
    saved: list[dict[str, Any]] = []
    with pytest.raises(WrongResult, match=r"quest: attention of layer \d is off by"):
        run(("dense", "quest", "streaming_llm"), saved)
    assert [entry["name"] for entry in saved[-1]["entries"]] == ["dense", "streaming_llm"]


def test_dense_comes_first() -> None:
    with pytest.raises(InvalidInput, match="expected dense as the first"):
        run(("quest",))
