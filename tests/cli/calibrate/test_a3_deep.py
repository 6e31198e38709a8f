"""`longreach calibrate a3_deep`: a plan that fused reads of its model take, shown, verified and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.methods.fusion.plan import A3DeepPlan
from longreach.plans import load as load_plan
from longreach.records import Journal
from longreach.testing.tiny import save_tiny
from tests.cli.test_bad_input import refused


def asked(model: Path, output: Path, *more: Any) -> list[Any]:
    return ["calibrate", "a3_deep", "--model", model, "--tasks", "needle_sweep", "--length", 500, "--prompts", 2,
            "--chunk-tokens", 100, "--output", output, *more]  # fmt: skip


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "deep", num_hidden_layers=4)


def test_a_plan_is_made_shown_verified_and_used(
    longreach: Any, deep: Path, tiny: Path, document: Path, tmp_path: Path
) -> None:
    output = tmp_path / "p.json"
    result = longreach(*asked(deep, output, "--ratio", 0.2))
    assert result.code == 0, result.err
    plan = load_plan(output, "a3_deep")
    view = A3DeepPlan.of(plan)
    assert view.layers == (0, 1, 2, 3) and view.ratio == 0.2 and view.kl[view.layer] == min(view.kl) > 0
    assert plan.made.settings["chunk_tokens"] == 100 and plan.made.data.startswith("2 prompts of each of needle_sweep")
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines() if line[:5].strip().isdigit()}
    assert set(rows) == {"0", "1", "2", "3"}
    assert [layer for layer, row in rows.items() if row[-1] == "chooses"] == [str(view.layer)]
    assert rows["3"][0] == f"{view.kl[3]:.3g}" and all(len(line) <= 80 for line in result.out.splitlines()[:-1])
    assert longreach("plan", "verify", output, "--model", deep).code == 0
    shown = json.loads(longreach("plan", "show", output, "--json").out)
    assert A3DeepPlan.of(plan).values() == shown["values"] and shown["kind"] == "a3_deep"

    run = ["run", "--documents", document, document, "--question", "Who?", "--max-new-tokens", 2, "--fuse", "a3_deep",
           "--set", f"fuse.plan={output}", "--json"]  # fmt: skip
    assert json.loads(longreach(*run, "--model", deep).out)["fuse"]["plan"] == str(output)
    refused(longreach(*run, "--model", tiny), "is for deep, and this is another model", "longreach calibrate a3_deep")
    compare = ["compare", "--model", deep, "--documents", document, document, "--chunk-tokens", 40, "--steps", 2,
               "--json"]  # fmt: skip
    planned = f"dense fuse=a3_deep fuse.plan={output}"
    plain = f"dense fuse=a3_deep fuse.layer={view.layer}"
    found = json.loads(longreach(*compare, "--method", planned, "--method", plain).out)["comparisons"]
    assert found[1]["kl_steps"] == found[2]["kl_steps"] and found[1]["fuse"]["plan"] == str(output)
    both = longreach(*compare, "--method", plain, "--set", f"fuse.plan={output}")
    refused(both, "the plan sets the layer; give only one of the two")


def test_some_layers_in_json_and_an_interrupted_run(
    longreach: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, other, add = tmp_path / "p.json", tmp_path / "q.json", Journal.add
    said = json.loads(longreach(*asked(tiny, output, "--layers", "1", "--json")).out)
    assert said["values"]["layers"] == [1] and said["values"]["layer"] == 1 and said["seconds"] > 0

    def once(journal: Journal, name: str, part: Any) -> None:
        add(journal, name, part)
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", once)
    assert longreach(*asked(tiny, other, "--layers", "1")).code != 0 and not other.exists()
    monkeypatch.undo()
    again = longreach(*asked(tiny, other, "--layers", "1"))
    assert "the last 1 of 2 prompts; the others by an earlier run" in again.out, again.err
    assert other.read_text() == output.read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--ratio", 0], ["ratio: expected a number above 0 and below 1"]),
        (["--ratio", 1], ["ratio: expected a number above 0 and below 1"]),
        (["--layers", "1,2"], ["layers 1,2: expected layers of the model, 0 to 1"]),
        (["--layers", "all"], ["--layers all: expected layer numbers"]),
        (["--chunk-tokens", 4000], ["at least two chunks", "got 1 chunk", "lower --chunk-tokens"]),
        (["--tasks", "needles2"], ["unknown task"]),
        (["--tasks", ""], ["nothing to calibrate on; give --tasks"]),
        (["--text", "book.txt"], ["--text"]),
        (["--length", 99999], ["the model's context"]),
        (["--output", "/proc/none/p.json"], ["cannot write /proc/none/p.json"]),
    ],
)
def test_bad_input(longreach: Any, tiny: Path, tmp_path: Path, more: list[Any], words: list[str]) -> None:
    refused(longreach(*asked(tiny, tmp_path / "p.json", *more)), *words)
