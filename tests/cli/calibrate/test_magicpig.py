"""`longreach calibrate magicpig`: a plan that its model takes, shown, drawn and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.adapters.transformers import load, shape_of
from longreach.methods.magicpig import MagicPIG
from longreach.methods.magicpig.calibrate import PAIRS
from longreach.plans import load as load_plan
from tests.cli.test_bad_input import refused

SMALL = {"local": 8, "seal": 8, "centre": 16}


def asked(model: Path, text: Path, output: Path, *more: Any) -> list[Any]:
    options = [x for name, value in SMALL.items() for x in (f"--{name}", value)]
    return ["calibrate", "magicpig", "--model", model, "--text", text, "--length", 201, "--prompts", 3, "--rows", 4,
            "--budget", 0.6, *options, "--output", output, *more]  # fmt: skip


def test_a_plan_is_made_that_the_model_takes(
    longreach: Any, drawn: None, tiny: Path, text: Path, tmp_path: Path
) -> None:  # fmt: skip
    output = tmp_path / "p.json"
    result = longreach(*asked(tiny, text, output))
    assert result.code == 0, result.err
    assert all(len(line) <= 80 for line in result.out.splitlines() if str(output) not in line)
    MagicPIG(plan=str(output), **SMALL).check(shape_of(load(tiny)[0]))
    plan = load_plan(output, "magicpig")
    assert plan.made.tokens == 603 and plan.made.settings["budget"] == plan.values["budget"] == 0.6
    assert plan.values["length"] == 201 and plan.values["element"] == 4 and plan.values["layers"] == [0, 1]
    assert set(plan.arrays) == {"error", "sampled", "sampled_heads", "looked_up"}
    assert all(list(x.shape) == [2, 2, len(PAIRS)] for x in plan.arrays.values())
    assert longreach("plan", "verify", output, "--model", tiny).code == 0
    shown = json.loads(longreach("plan", "show", output, "--json").out)
    assert shown["expected"]["search"] + shown["expected"]["attention"] <= 0.6
    assert [(row["bits"], row["tables"]) for row in shown["layers"]] == list(
        zip(plan.values["bits"], plan.values["tables"], strict=True)
    )
    assert len(shown["tried"]) == len(PAIRS) and all(row["error"] > 0 for row in shown["tried"])
    assert longreach("plan", "show", output, "--output", tmp_path / "p.png").code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_plan_again_and_less_memory(longreach: Any, tiny: Path, text: Path, tmp_path: Path) -> None:
    one, other, small = (tmp_path / f"{name}.json" for name in "abc")
    said = [json.loads(longreach(*asked(tiny, text, path, "--json")).out) for path in (one, other)]
    assert said[0]["tried"] == said[1]["tried"] and said[0]["seconds"] > 0
    assert one.read_text() == other.read_text()
    most = said[0]["expected"]["memory"] / 2
    less = json.loads(longreach(*asked(tiny, text, small, "--memory", most, "--budget", 0.9, "--json")).out)
    assert less["expected"]["memory"] <= most and less["values"]["memory"] == most


def test_a_decoding_run_takes_it(longreach: Any, tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    assert longreach(*asked(tiny, text, output)).code == 0
    run = ["run", "--model", tiny, "--document", text, "--question", "Who?", "--max-new-tokens", 3, "--decode",
           "magicpig", *(x for name, value in SMALL.items() for x in ("--set", f"decode.{name}={value}"))]  # fmt: skip
    found = json.loads(longreach(*run, "--set", f"decode.plan={output}", "--json").out)
    assert found["decode"]["plan"] == str(output) and found["decode"]["bits"] is None
    refused(longreach(*run, "--set", f"decode.plan={output}", "--set", "decode.bits=4"), "bits: a plan chooses it")
    refused(longreach(*run, "--set", "decode.budget=0.3"), "budget=0.3 needs a plan", "longreach calibrate magicpig")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prompts", 30], ["30 prompts of 201 tokens", "--text"]),
        (["--length", 30], ["30 tokens are too short", "40 tokens are needed", "--length"]),
        (["--budget", 0], ["budget: expected a share in (0, 1], got 0.0", "--budget"]),
        (["--budget", 1.5], ["budget: expected a share in (0, 1]"]),
        (["--budget", "nan"], ["budget: expected a share in (0, 1]"]),
        (["--budget", 0.01], ["budget: no choice of the plan's pairs reads at most 0.01"]),
        (["--memory", -1], ["memory: expected a share > 0"]),
        (["--least", 0], ["least: expected an int in [1"]),
        (["--local", 0], ["local: expected a count of tokens in [1, 65536]"]),
        (["--output", "/proc/none/p.json"], ["cannot write /proc/none/p.json"]),
    ],
)
def test_bad_input(longreach: Any, tiny: Path, text: Path, tmp_path: Path, more: list[Any], words: list[str]) -> None:
    refused(longreach(*asked(tiny, text, tmp_path / "p.json", *more)), *words)
