"""`longreach calibrate kascade`: a plan that fits its model; bad input; interrupted and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.adapters.transformers import load, shape_of
from longreach.evals.calibration.kascade import KascadeGather
from longreach.methods.kascade.calibration_result import CalibrationResult
from longreach.methods.kascade.plan import KascadePlan
from longreach.plans import find
from longreach.plans import load as load_plan
from longreach.testing.tiny import save_tiny
from tests.cli.test_bad_input import refused


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers."""
    return save_tiny(tmp_path_factory.mktemp("models") / "four", num_hidden_layers=4)


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same throughout, whoever commits meanwhile."""
    monkeypatch.setenv("LONGREACH_COMMIT", "f00d")


def asked(model: Path, text: Path, output: Path, *more: Any) -> list[Any]:
    return ["calibrate", "kascade", "--model", model, "--text", text, "--length", 301, "--prompts", 3, "--k", 16,
            "--tile", 32, "--budget", 2, "--output", output, *more]  # fmt: skip


def test_a_plan_is_made_that_the_model_takes(longreach: Any, model: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "plans" / "p.json"
    result = longreach(*asked(model, text, output))
    assert result.code == 0, result.err
    assert [p.name for p in output.parent.iterdir()] == ["p.json"]  # no journal stays
    plan = find("kascade", str(output), shape_of(load(model)[0]))
    view, found = KascadePlan.of(plan), CalibrationResult.of(plan)
    assert view.anchors[0] == 0 and len(view.anchors) == 2 and view.k == 16 and view.tile == 32
    assert view == found.plan(2, 16, 32)
    assert plan.model.name == "four" and plan.model.layers == 4
    made = plan.made
    assert made.tokens == 903 and len(made.sha256) == 64 and made.data == "3 windows of book.txt; 301 tokens each"
    assert made.settings == {"length": 301, "prompts": 3, "prefill_chunk_size": 512, "dtype": "float32", "k": 16,
                             "tile": 32, "budget": 2, "ranks": 1, "weighted": False}  # fmt: skip
    assert made.seed == 1 and made.torch and made.transformers and made.device and made.longreach
    lines = result.out.splitlines()
    assert all(len(line) <= 80 or str(output) in line for line in lines)
    assert lines[-1].endswith(f"To use it: 'kascade plan={output}'")
    for layer in range(4):
        row = next(line.split() for line in lines if line.split()[:1] == [str(layer)])
        role = ["anchor"] if layer in view.anchors else ["reuses", str(view.anchor_of(layer))]
        assert row[1 : 1 + len(role)] == role and f"{float(found.importance[layer]):.4f}" in row
        if layer not in view.anchors:
            assert row[-2:] == [str(h) for h in view.head_map[layer]]


def test_json_and_the_same_plan_again(longreach: Any, model: Path, text: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    said = [json.loads(longreach(*asked(model, text, path, "--json")).out) for path in (one, other)]
    assert said[0]["values"] == said[1]["values"] and said[0]["output"] == str(one) and said[0]["seconds"] > 0
    assert one.read_text() == other.read_text()
    assert [row["layer"] for row in said[0]["layers"]] == [0, 1, 2, 3]
    assert [len(row["anchors"]) for row in said[0]["budgets"]] == [1, 2, 3, 4]
    assert said[0]["budgets"][1]["anchors"] == said[0]["values"]["anchors"]
    assert said[0]["budgets"][3]["value"] == pytest.approx(1)


def test_tasks_are_read_beside_text(longreach: Any, model: Path, text: Path, tmp_path: Path) -> None:
    more = ["--tasks", "vt", "--length", 1400, "--prompts", 1, "--seed", 5, "--json"]
    found = json.loads(longreach(*asked(model, text, tmp_path / "p.json", *more)).out)
    assert found["made"]["data"] == "1 window of book.txt; 1 prompt of each of vt; 1400 tokens each"
    assert found["made"]["seed"] == 5


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--budget", 0], ["budget", "at least 1", "got 0"]),
        (["--budget", -1], ["budget", "at least 1"]),
        (["--budget", 5], ["budget", "1 to 4 anchors", "got 5", "--budget"]),
        (["--served", 0.5], ["budget fixes the number of anchors", "give one of them"]),
        (["--ranks", 3], ["ranks", "divides the 2 KV heads", "got 3", "--ranks"]),
        (["--prompts", 30], ["30 prompts of 301 tokens are 9000 tokens", "book.txt", "--text"]),
        (["--length", 32], ["32 tokens are too short", "33 tokens are needed", "--length"]),
        (["--length", 9000], ["at most 4096 tokens, the model's context", "got 9000"]),
        (["--k", 0], ["at least 1", "--k"]),
        (["--tile", "x"], ["whole number", "--tile"]),
        (["--text", "/no/such.txt"], ["cannot read /no/such.txt"]),
        (["--tasks", "sudoku"], ["unknown task 'sudoku'"]),
        (["--model", "/no/model"], ["no model directory at /no/model"]),
        (["--output", "/proc/none/p.json"], ["cannot write /proc/none/p.json"]),
    ],
)
def test_bad_input(longreach: Any, model: Path, text: Path, tmp_path: Path, more: list[Any], words: list[str]) -> None:
    refused(longreach(*asked(model, text, tmp_path / "p.json", *more)), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("length", "tiles"), [(34, 1), (80, 3), (81, 4)])
def test_few_tiles_are_told(longreach: Any, model: Path, text: Path, tmp_path: Path, length: int, tiles: int) -> None:
    """Of 16 tokens each; the first one that has more than 16 keys before it begins at 32."""
    result = longreach(*asked(model, text, tmp_path / "p.json", "--length", length))
    assert result.code == 0
    told = f"the shortest prompt has {length} tokens, and {tiles} of its tiles of 16 tokens more than 16 keys before"
    assert (told in result.err and "raise --length" in result.err) if tiles < 4 else not result.err


def test_nothing_to_read(longreach: Any, model: Path, tmp_path: Path) -> None:
    refused(longreach("calibrate", "kascade", "--model", model, "--output", tmp_path / "p.json", "--budget", 2),
            "nothing to calibrate on", "--text")  # fmt: skip


def test_interrupted_it_goes_on_where_it_stopped(
    longreach: Any, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, whole = tmp_path / "p.json", tmp_path / "whole.json"
    assert longreach(*asked(model, text, whole)).code == 0
    finish, done = KascadeGather.finish, list[int]()

    def dies(self: KascadeGather) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return finish(self)

    monkeypatch.setattr(KascadeGather, "finish", dies)
    result = longreach(*asked(model, text, output))
    assert result.code == 130 and "the same command continues" in result.err
    assert not output.exists() and (tmp_path / "p.json.journal").is_file()
    monkeypatch.setattr(KascadeGather, "finish", finish)
    refused(longreach(*asked(model, text, output, "--k", 8)), "differs in settings.k", "p.json.journal")
    read: list[str] = []
    begin = KascadeGather.begin
    monkeypatch.setattr(KascadeGather, "begin", lambda self, p: (read.append(p.name), begin(self, p))[1])
    again = longreach(*asked(model, text, output))
    assert again.code == 0 and "the last 1 of 3 prompts; the others by an earlier run" in again.out
    assert len(read) == 1 and not (tmp_path / "p.json.journal").exists()
    assert output.read_text() == whole.read_text()
    assert load_plan(output, "kascade").made == load_plan(whole, "kascade").made


def test_a_budget_is_chosen_anew_without_reading_anew(
    longreach: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only after reading is it known that layers with a window take no part."""
    model = save_tiny(tmp_path / "gemma", "gemma2", num_hidden_layers=4)
    output = tmp_path / "p.json"
    refused(longreach(*asked(model, text, output, "--budget", 3)), "1 to 2 anchors", "got 3")
    monkeypatch.setattr(KascadeGather, "begin", lambda *_: 1 / 0)
    assert longreach(*asked(model, text, output)).code == 0
    assert KascadePlan.of(load_plan(output, "kascade")).anchors == (1, 3)


def test_heads_stay_on_their_rank(longreach: Any, model: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    assert longreach(*asked(model, text, output, "--ranks", 2)).code == 0
    plan = load_plan(output, "kascade")
    assert KascadePlan.of(plan).head_map == ((0, 1),) * 4 and CalibrationResult.of(plan).ranks == 2
    assert plan.made.settings["ranks"] == 2


def test_layers_may_count_alike(longreach: Any, model: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    assert "equal weights" in " ".join(longreach(*asked(model, text, output)).out.split())
    result = longreach(*asked(model, text, output, "--weighted", "yes"))
    assert result.code == 0 and "weighted by importance" in " ".join(result.out.split())
    plan = load_plan(output, "kascade")
    found = CalibrationResult.of(plan)
    assert found.weighted and KascadePlan.of(plan) == found.plan(2, 16, 32)
    assert plan.made.settings["weighted"] is True


def test_without_a_budget_every_layer_is_served(longreach: Any, model: Path, text: Path, tmp_path: Path) -> None:
    """Least of all anchors for a share of 0, each layer its own for 1; the default lies between."""
    made = {}
    for served in (0, None, 1):
        output = tmp_path / f"{served}.json"
        command = [x for x in asked(model, text, output) if x not in ("--budget", 2)]
        result = longreach(*command, *(() if served is None else ("--served", served)))
        assert result.code == 0, result.err
        plan = load_plan(output, "kascade")
        made[served], found = KascadePlan.of(plan), CalibrationResult.of(plan)
        least = 0.6 if served is None else served
        assert plan.made.settings["served"] == least and plan.made.settings["budget"] == len(made[served].anchors)
        for layer in range(4):
            assert float(found.plain[made[served].anchor_of(layer), layer]) >= least
    assert made[0].anchors == (0,) and made[1].anchors == (0, 1, 2, 3)
    assert 1 <= len(made[None].anchors) <= 4
    command = [x for x in asked(model, text, tmp_path / "x.json") if x not in ("--budget", 2)]
    refused(longreach(*command, "--served", 1.5), "served: expected a share in [0, 1], got 1.5")
