"""Cases of Kascade's prefill run at a small size, are right before they have a time, and have the targets' entries."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.bench.case import KASCADE_PREFILL
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.kascade_prefill import PromptLayers
from longreach.bench.run import run_case
from longreach.methods.kascade import prefill
from longreach.ops import Partial

CPU = torch.device("cpu")
WITHOUT = "flashinfer", "flash_attention_3"
EXACT, SAMPLED = "kascade-prefill-128k-10pct", "kascade-prefill-sampled-128k-10pct"
KINDS_ALONE = "kascade-prefill-512k-10pct"


def run(name: str, **changes: Any) -> dict[str, Any]:
    return run_case(replace(tiny(CASES[name]), **changes), CPU, without=WITHOUT, replays=2)


def test_cases_and_targets() -> None:
    cases = {name: case for name, case in CASES.items() if case.group == KASCADE_PREFILL}
    assert len(cases) == 21 and all(case.shape.rows == case.shape.context for case in cases.values())
    bounds = {name: [(t.quantity, t.over, t.bound) for t in case.targets] for name, case in cases.items()}
    over = "speed over", "flash_attention_3"
    assert bounds[EXACT] == [(*over, 2.3)]
    assert bounds[SAMPLED] == [(*over, 3.0), ("mass of chosen keys", None, 0.98)]
    assert bounds["kascade-prefill-64k-20pct"] == [(*over, 1.62)]
    assert bounds["kascade-prefill-2k-10pct"] == []


@pytest.mark.parametrize("name", [EXACT, SAMPLED])
def test_a_case_runs_beside_dense_attention(name: str) -> None:
    result = run(name, targets=CASES[name].targets)
    names = [entry["name"] for entry in result["entries"]]
    parts = [f"anchor: {part}" for part in ("log-sums", "scores", "top-k", "attend")]
    assert names == ["kascade", "layer 0", "anchor", "reuse layer", *parts, "torch SDPA math"]
    assert all(entry["microseconds"]["median"] > 0 and entry["error"] < 1e-4 for entry in result["entries"])
    assert result["targets"][0]["got"] is None, "FlashAttention-3 is left out"
    if name == SAMPLED:
        assert result["scored_by"] == "every row of a tile, log-sums from every 16th key"
        assert result["targets"][1]["got"] == result["mass_of_chosen"] <= 1.0
    else:
        assert result["mass_of_chosen"] > 0.9999 and result["scored_by"] == "every row of a tile, exact log-sums"


def test_a_stack_that_is_not_captured_is_the_mean_of_its_kinds() -> None:
    assert [name for name, case in CASES.items() if case.stack and not case.stack.captured] == [KINDS_ALONE]
    result = run(KINDS_ALONE)
    found = {entry["name"]: entry["microseconds"]["replays"] for entry in result["entries"]}
    assert list(found) == ["kascade", "layer 0", "anchor", "reuse layer", "torch SDPA math"]
    of_four = [sum(us) / 4 for us in zip(*(found[n] for n in ("layer 0", "anchor", "reuse layer", "reuse layer")))]
    assert found["kascade"] == pytest.approx(of_four, rel=1e-6)
    assert result["timing"]["how"].endswith("kinds of layers by number")


def test_wrong_results_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PromptLayers.run

    def sloppy(self: PromptLayers, layer: int, copy: int) -> Any:
        call, outcome = plain(self, layer, copy)
        return call, outcome._replace(partial=Partial(outcome.partial.out * 1.01, outcome.partial.lse))

    monkeypatch.setattr(PromptLayers, "run", sloppy)
    with pytest.raises(WrongResult, match="of a reuse layer is too large"):
        run(EXACT)


def test_a_wrong_choice_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = prefill._choose

    def oldest(
        budget: Any, call: Any, tiles: Any, scored: Any, some: slice, offsets: Any, lse: Any, index: Any
    ) -> None:
        plain(budget, call, tiles, scored, some, offsets, lse, index)
        for first, last in itertools.pairwise(offsets.tolist()):
            index[first:last] = torch.arange(last - first)

    monkeypatch.setattr(prefill, "_choose", oldest)
    with pytest.raises(WrongResult, match="chosen keys hold"):
        run(EXACT)
