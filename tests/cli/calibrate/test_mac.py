"""`longreach calibrate mac`: a plan that its model takes, shown and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.adapters.transformers import load, shape_of
from longreach.methods.mac import MAC
from longreach.methods.mac.plan import MACPlan
from longreach.plans import load as load_plan
from tests.cli.test_bad_input import refused


def asked(model: Path, text: Path, output: Path, *more: Any) -> list[Any]:
    return ["calibrate", "mac", "--model", model, "--text", text, "--length", 201, "--prompts", 3, "--window", 70,
            "--widest", 32, "--rows", 20, "--epsilon", 0.6, "--output", output, *more]  # fmt: skip


def test_a_plan_is_made_that_the_model_takes(longreach: Any, tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    result = longreach(*asked(tiny, text, output))
    assert result.code == 0, result.err
    MAC(window=None, band=None, tau=None, scale="calibrated", plan=str(output)).check(shape_of(load(tiny)[0]))
    plan = load_plan(output, "mac")
    view = MACPlan.of(plan)
    assert plan.made.tokens == 603 and plan.made.data == "3 windows of book.txt; 201 tokens each"
    assert {name: plan.made.settings[name] for name in ("window", "rows", "sinks", "alpha", "epsilon", "widest")} == {
        "window": 70, "rows": 20, "sinks": 4, "alpha": 0.01, "epsilon": 0.6, "widest": 32,
    }  # fmt: skip
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines() if line[:5].strip().isdigit()}
    assert set(rows) == {"0", "1"}
    for layer in range(2):
        band = "none" if view.band[layer] is None else str(view.band[layer])
        assert rows[str(layer)][:3] == [str(view.window[layer]), band, f"{view.tau['sqrt2d'][layer]:.3f}"]
    assert longreach("plan", "verify", output, "--model", tiny).code == 0
    shown = json.loads(longreach("plan", "show", output, "--json").out)
    assert len(shown["energy"]) == 2 and shown["values"]["windows"] == [64, 70]


def test_a_layer_without_a_band_has_no_weight_on_it(longreach: Any, tiny: Path, text: Path, tmp_path: Path) -> None:
    result = longreach(*asked(tiny, text, tmp_path / "p.json", "--epsilon", 0.001, "--widest", 8))
    assert result.code == 0, result.err
    rows = [line.split() for line in result.out.splitlines() if line[:5].strip().isdigit()]
    assert len(rows) == 2 and all((row[2], row[5]) == ("none", "none") for row in rows)
    assert "none where there is no band" in " ".join(result.out.split())


def test_a_plan_of_another_dtype_is_told_of_and_taken(longreach: Any, tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    assert longreach(*asked(tiny, text, output)).code == 0
    assert json.loads(longreach("plan", "verify", output, "--model", tiny, "--json").out)["warning"] is None
    document = json.loads(output.read_text())
    assert document["made"]["settings"]["dtype"] == "float32"
    document["made"]["settings"]["dtype"] = "bfloat16"
    output.write_text(json.dumps(document))
    result = longreach("plan", "verify", output, "--model", tiny)
    assert result.code == 0 and "is whole" in result.out
    assert "calibrated in bfloat16, and the model is stored in float32" in " ".join(result.out.split())
    document["values"]["window"][1] = 1 << 25
    output.write_text(json.dumps(document))
    result = longreach("plan", "verify", output, "--model", tiny)
    assert result.code == 1 and "window: expected counts in [1, 16777216), got 33554432" in " ".join(result.out.split())


def test_the_same_plan_again(longreach: Any, tiny: Path, text: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    said = [json.loads(longreach(*asked(tiny, text, path, "--json")).out) for path in (one, other)]
    assert said[0]["values"] == said[1]["values"] and said[0]["seconds"] > 0
    assert one.read_text() == other.read_text()


def test_a_decoding_run_takes_it(longreach: Any, tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    assert longreach(*asked(tiny, text, output)).code == 0
    assert longreach("plan", "verify", output, "--model", tiny).code == 0
    run = ["run", "--model", tiny, "--document", text, "--question", "Who?", "--max-new-tokens", 5, "--decode", "mac"]
    more = ["--set", "decode.tau=null", "--set", "decode.window=null", "--set", "decode.min_context=0"]
    found = json.loads(longreach(*run, *more, "--set", f"decode.plan={output}", "--json").out)
    assert found["decode"]["name"] == "mac" and found["decode"]["plan"] == str(output)
    layers = [layer for layer in found["report"]["layers"] if layer["phase"] == "decode"]
    assert all(layer["notes"]["searched"][0] > 0 for layer in layers)
    refused(longreach(*run, "--set", "decode.tau=null"), "no mac plan is shipped for this model", "calibrate mac")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--alpha", 0], ["alpha: expected a share in (0, 1), got 0.0", "--alpha"]),
        (["--alpha", "nan"], ["alpha: expected a share"]),
        (["--epsilon", 1], ["epsilon: expected a share in (0, 1), got 1.0", "--epsilon"]),
        (["--window", 0], ["at least 1", "--window"]),
        (["--rows", 0], ["at least 1", "--rows"]),
        (["--length", 141], ["141 tokens are too short", "142 tokens are needed", "--length"]),
        (["--length", 141, "--widest", 40], ["141 tokens are too short", "152 tokens are needed", "--length"]),
        (["--prompts", 30], ["30 prompts of 201 tokens", "--text"]),
        (["--output", "/proc/none/p.json"], ["cannot write /proc/none/p.json"]),
    ],
)
def test_bad_input(longreach: Any, tiny: Path, text: Path, tmp_path: Path, more: list[Any], words: list[str]) -> None:
    refused(longreach(*asked(tiny, text, tmp_path / "p.json", *more)), *words)
