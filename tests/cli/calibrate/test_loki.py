"""`longreach calibrate loki`: a plan that its model takes, shown and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.adapters.transformers import load, shape_of
from longreach.methods.loki import Loki
from longreach.plans import load as load_plan
from tests.cli.test_bad_input import refused


def asked(model: Path, text: Path, output: Path, *more: Any) -> list[Any]:
    return ["calibrate", "loki", "--model", model, "--text", text, "--length", 201, "--prompts", 3, "--output", output,
            *more]  # fmt: skip


def test_a_plan_is_made_that_the_model_takes(longreach: Any, tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    result = longreach(*asked(tiny, text, output))
    assert result.code == 0, result.err
    Loki(plan=str(output)).check(shape_of(load(tiny)[0]))
    plan = load_plan(output, "loki")
    assert plan.made.tokens == 603 and plan.made.data == "3 windows of book.txt; 201 tokens each"
    assert {name: list(x.shape) for name, x in plan.arrays.items()} == {
        "basis": [2, 2, 16, 16], "variance": [2, 2, 16]
    }  # fmt: skip
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines() if line[:5].strip().isdigit()}
    assert set(rows) == {"0", "1"} and all(len(row) == 3 for row in rows.values())
    assert longreach("plan", "verify", output, "--model", tiny).code == 0
    shown = json.loads(longreach("plan", "show", output, "--json").out)
    assert list(shown["explained"]) == ["2", "4", "8"]
    shares = shown["explained"]["4"][1]
    assert rows["1"][1] == f"{sum(shares) / 2:.1%}" and all(0.25 < share < 1 for share in shares)


def test_the_same_plan_again(longreach: Any, tiny: Path, text: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    said = [json.loads(longreach(*asked(tiny, text, path, "--json")).out) for path in (one, other)]
    assert said[0]["explained"] == said[1]["explained"] and said[0]["seconds"] > 0
    assert one.read_text() == other.read_text()


def test_a_decoding_run_takes_it(longreach: Any, tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    assert longreach(*asked(tiny, text, output)).code == 0
    run = ["run", "--model", tiny, "--document", text, "--question", "Who?", "--max-new-tokens", 3, "--decode", "loki"]
    found = json.loads(longreach(*run, "--set", f"decode.plan={output}", "--json").out)
    options = {"k": 0.1, "rank": 0.25, "plan": str(output), "dense_layers": [], "choose": "top", "seed": 0,
               "error_bars": False, "redo": None}  # fmt: skip
    assert found["decode"] == {"name": "loki", **options}
    assert found["report"]["decode"] < 1
    none = [*run, "--set", "decode.plan=none"]
    refused(longreach(*none), "no loki plan is shipped for this model", "longreach calibrate loki", "plan=plan.json")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prompts", 30], ["30 prompts of 201 tokens", "--text"]),
        (["--length", 1], ["1 tokens are too short", "2 tokens are needed", "--length"]),
        (["--output", "/proc/none/p.json"], ["cannot write /proc/none/p.json"]),
    ],
)
def test_bad_input(longreach: Any, tiny: Path, text: Path, tmp_path: Path, more: list[Any], words: list[str]) -> None:
    refused(longreach(*asked(tiny, text, tmp_path / "p.json", *more)), *words)
