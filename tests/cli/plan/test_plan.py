"""`longreach plan show`, `verify` and `compare`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longreach.adapters.transformers import load, shape_at, shape_of
from longreach.cli.plan.checks import VALUES
from longreach.cli.plan.common import SHOWN, VIEWS
from longreach.methods.kascade.calibration_result import CalibrationResult
from longreach.methods.kascade.plan import KascadePlan
from longreach.methods.magicpig import MagicPIG
from longreach.plans import KINDS, Plan, PlannedModel
from longreach.plans import load as load_plan
from longreach.testing.tiny import save_tiny
from tests.cli.test_bad_input import refused
from tests.methods.drive import MODEL
from tests.methods.planned import mac_plan, magicpig_plan
from tests.plans.factory import plan

LAYERS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "six", num_hidden_layers=LAYERS)


def made(model: Path, seed: int = 0, **changes: Any) -> Plan:
    """A kascade plan with two anchors, of random numbers."""
    draw = torch.Generator().manual_seed(seed)
    heads = torch.rand(LAYERS, 2, LAYERS, 2, generator=draw, dtype=torch.float64)
    for layer in range(LAYERS):
        heads[layer, :, layer] = torch.eye(2)
    found = CalibrationResult(tuple(range(LAYERS)), heads, torch.rand(LAYERS, generator=draw).double())
    planned = PlannedModel.of("six", shape_of(load(model)[0]))
    base = plan("kascade", model=planned, values=found.plan(2, 64, 128).values(), arrays=found.arrays())
    return replace(base, **changes)


@pytest.fixture
def saved(model: Path, tmp_path: Path) -> Path:
    made(model).save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_show(longreach: Any, saved: Path) -> None:
    result = longreach("plan", "show", saved)
    assert result.code == 0, result.err
    assert all(len(line) <= 80 for line in result.out.splitlines())
    for word in ("kascade plan for six: 6 layers, 4 query and 2 KV", "4096 tokens", "sha256 abababababab", "seed 0",
                 "length 1024", "served at best, %", "anchor", "reuses", "even"):  # fmt: skip
        assert word in " ".join(result.out.split())
    said = json.loads(longreach("plan", "show", saved, "--json").out)
    assert said["values"]["anchors"] == [row["layer"] for row in said["layers"] if row["anchor"] == row["layer"]]
    assert said["arrays"]["similarity"] == {"dtype": "float32", "shape": [6, 2, 6, 2]}
    served = said["similarity"]["served"]
    reused = next(row for row in said["layers"] if row["anchor"] != row["layer"])
    assert reused["served"] == pytest.approx(served[reused["anchor"]][reused["layer"]])
    assert f"{100 * served[0][1]:4.0f}" in result.out


def test_served_is_what_the_plans_own_map_gives(longreach: Any, saved: Path, tmp_path: Path) -> None:
    """Not what the best map would: here each head takes the keys of the head with its own number."""
    path = tmp_path / "own.json"
    said = json.loads(
        longreach("plan", "choose", saved, "--budget", 2, "--heads", "own", "--output", path, "--json").out
    )
    heads = load_plan(path, "kascade").arrays["similarity"]
    worse = 0
    for row in said["layers"]:
        a, n = row["anchor"], row["layer"]
        assert row["served"] == pytest.approx(float(heads[a, 0, n, 0] + heads[a, 1, n, 1]) / 2)
        worse += row["served"] < said["similarity"]["served"][a][n] - 1e-6
    assert worse
    out = longreach("plan", "show", path).out.splitlines()
    reused = next(row for row in said["layers"] if row["anchor"] != row["layer"])
    assert f" {100 * reused['served']:.1f}% " in next(line for line in out if f"reuses {reused['anchor']}" in line)


def test_similarity_in_a_narrow_terminal(longreach: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    out = longreach("plan", "show", saved).out.splitlines()
    assert any(line.strip() == "012345" for line in out)
    assert any(line.split()[:1] == ["5"] and line.endswith("*") for line in out)


def test_a_picture(longreach: Any, drawn: None, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert longreach("plan", "show", saved, "--output", tmp_path / "new" / "s.png").code == 0
    assert (tmp_path / "new" / "s.png").read_bytes().startswith(b"\x89PNG")
    refused(longreach("plan", "show", saved, "--output", "/proc/none/s.png"), "cannot write")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(longreach("plan", "show", saved, "--output", tmp_path / "t.png"), "pip install 'longreach[report]'")


def test_plans_of_other_kinds_are_shown_plainly(
    longreach: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in (VIEWS, SHOWN):
        monkeypatch.delitem(known, "mac")
    plan("mac").save(tmp_path / "p.json")
    out = longreach("plan", "show", tmp_path / "p.json").out
    assert "mac plan for some-model" in out and "taus: [0.1, 0.2]" in out and "large: bfloat16 [40, 128]" in out
    refused(longreach("plan", "show", tmp_path / "p.json", "--output", tmp_path / "p.png"), "no picture")


def number(document: dict[str, Any], array: str, value: float) -> None:
    """Write over the first number of an array that stands in the file itself."""
    document["arrays"][array]["numbers"][0] = value


def test_numbers_may_be_off_by_rounding(longreach: Any, saved: Path, model: Path) -> None:
    document = json.loads(saved.read_text())
    number(document, "similarity", 1.000001)
    number(document, "importance", -0.000001)
    saved.write_text(json.dumps(document))
    assert longreach("plan", "verify", saved, "--model", model).code == 0


def test_verify(longreach: Any, saved: Path, model: Path) -> None:
    result = longreach("plan", "verify", saved, "--model", model)
    assert result.code == 0 and "is whole, and a kascade plan for this model" in result.out
    said = json.loads(longreach("plan", "verify", saved, "--model", model, "--json").out)
    assert said == {"plan": str(saved), "model": str(model), "fits": True, "fault": None, "warning": None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["model"].update(kv_heads=1), "similarity"),
        (lambda d: d["model"].update(config="0" * 64), "hash of the configuration"),
        (lambda d: d["model"].update(query_heads=8), "query heads 8 expected, 4 came"),
        (lambda d: d.pop("made"), "lacks the field 'made'"),
        (lambda d: d["values"].pop("head_map"), "lacks the value 'head_map'"),
        (lambda d: d["values"]["anchors"].append(6), "anchors: expected layer numbers from 0 to 5"),
        (lambda d: d["arrays"].pop("importance"), "lacks the array 'importance'"),
        (lambda d: d.update(kind="quest"), "'quest'"),
        (lambda d: d["values"].update(weighted=1), "weighted: expected true or false"),
        (
            lambda d: d["values"].update(ranks="2"),
            "ranks: expected a number that divides the 2 KV heads, got '2'; take",
        ),
        (lambda d: d["values"].update(ranks=3), "ranks: expected a number that divides the 2 KV heads, got 3; take an"),
        (lambda d: d["values"].update(ranks=True), "ranks: expected a number that divides the 2 KV heads, got True"),
        (lambda d: d["values"].update(anchors=[0, -1]), "anchors: expected layer numbers, whole and from 0 on, got -1"),
        (
            lambda d: d["values"].update(anchors=[0, True]),
            "anchors: expected layer numbers, whole and from 0 on, got T",
        ),
        (lambda d: d["values"].update(layers=[0, 1.5]), "layers: expected layer numbers, whole and from 0 on, got 1.5"),
        (lambda d: d["values"].update(anchor=[0]), "unknown value 'anchor'; known of kascade are: anchors, head_map"),
        (lambda d: number(d, "similarity", 1.001), "array 'similarity': expected numbers in [0, 1], got 0"),
        (lambda d: number(d, "similarity", -0.001), "array 'similarity': expected numbers in [0, 1], got -0.001 to 1"),
        (lambda d: number(d, "importance", 2.1), "array 'importance': expected numbers in [0, 2]"),
    ],
)
def test_what_does_not_fit_is_found(longreach: Any, saved: Path, model: Path, change: Any, words: str) -> None:
    document = json.loads(saved.read_text())
    if words == "similarity":
        document["values"]["head_map"] = [[0]] * LAYERS
    change(document)
    saved.write_text(json.dumps(document))
    result = longreach("plan", "verify", saved, "--model", model)
    assert result.code == 1 and words in result.out and not result.err
    said = longreach("plan", "verify", saved, "--model", model, "--json")
    assert said.code == 1 and json.loads(said.out)["fits"] is False and words in json.loads(said.out)["fault"]


def test_a_file_of_anything(longreach: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[1]")
    assert longreach("plan", "verify", tmp_path / "p.json", "--model", model).code == 1
    refused(longreach("plan", "show", tmp_path / "p.json"), "expected an object")


def test_what_is_not_there(longreach: Any, saved: Path) -> None:
    for verb in ("show", "verify"):
        more = ["--model", "mini"] if verb == "verify" else []
        refused(longreach("plan", verb, "none.json", *more), "no plan 'none.json'", "check the path")
    refused(longreach("plan", "verify", saved, "--model", "/no/model"), "no model directory")
    refused(longreach("plan", "verify", saved), "--model")


def test_compare(longreach: Any, saved: Path, model: Path, tmp_path: Path) -> None:
    made(model, seed=1).save(tmp_path / "q.json")
    result = longreach("plan", "compare", saved, tmp_path / "q.json")
    assert result.code == 0 and all(len(line) <= 80 for line in result.out.splitlines())
    assert "anchors are the same" in result.out and "Correlation" in result.out
    said = json.loads(longreach("plan", "compare", saved, saved, "--budget", 3, "--json").out)
    assert said["budget"] == 3 and said["kept"] == [1.0, 1.0] and said["shared"] == 3 and said["heads"] == 1.0
    refused(longreach("plan", "compare", saved, saved, "--budget", 7), "1 to 6 anchors")
    other = made(model)
    replace(other, model=replace(other.model, config="0" * 64)).save(tmp_path / "r.json")
    refused(longreach("plan", "compare", saved, tmp_path / "r.json"), "another model")
    mac_plan(MODEL).save(tmp_path / "m.json")
    refused(longreach("plan", "compare", saved, tmp_path / "m.json"), "is a mac plan")


def test_choose(longreach: Any, saved: Path, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    before = CalibrationResult.of(load_plan(saved, "kascade"))
    for option, anchors in (
        (("--budget", 3), before.plan(3, 64, 128).anchors),
        (("--evenly", 3), (0, 2, 4)),
        (("--anchors", "0,5,3"), (0, 3, 5)),
    ):
        result = longreach("plan", "choose", saved, *option, "--output", path)
        assert result.code == 0, result.err
        found = load_plan(path, "kascade")
        view = KascadePlan.of(found)
        assert view == before.with_anchors(anchors, 64, 128) and view.anchors == anchors
        assert found.made.settings["budget"] == 3 and found.made.sha256 == load_plan(saved, "kascade").made.sha256
    own = json.loads(
        longreach("plan", "choose", saved, "--budget", 2, "--heads", "own", "--output", path, "--json").out
    )
    assert own["values"]["head_map"] == [[0, 1]] * LAYERS and own["made"]["settings"]["heads"] == "own"
    assert longreach("plan", "verify", path, "--model", model).code == 0
    assert longreach("plan", "choose", saved, "--budget", 2, "--ranks", 2, "--output", path).code == 0
    assert KascadePlan.of(load_plan(path, "kascade")).head_map == ((0, 1),) * LAYERS
    assert longreach("plan", "choose", path, "--budget", 3, "--output", path).code == 0
    assert CalibrationResult.of(load_plan(path, "kascade")).ranks == 2
    assert longreach("plan", "choose", saved, "--budget", 2, "--weighted", "no", "--output", path).code == 0
    alike = replace(before, weighted=False)
    assert KascadePlan.of(load_plan(path, "kascade")) == alike.plan(2, 64, 128)
    assert longreach("plan", "choose", path, "--budget", 2, "--output", path).code == 0
    assert KascadePlan.of(load_plan(path, "kascade")) == alike.plan(2, 64, 128)
    assert longreach("plan", "choose", path, "--budget", 2, "--weighted", "yes", "--output", path).code == 0
    assert KascadePlan.of(load_plan(path, "kascade")) == before.plan(2, 64, 128)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--budget", 0), ["1 to 6 anchors", "got 0"]),
        (("--budget", 7), ["1 to 6 anchors", "got 7"]),
        (("--evenly", 0), ["1 to 6 anchors"]),
        (("--anchors", "0,6"), ["--anchors", "0, 1, 2, 3, 4, 5", "got 0, 6"]),
        (("--anchors", "1,2"), ["--anchors", "the first of them"]),
        (("--anchors", "a"), ["--anchors", "0,6"]),
        ((), ["--budget"]),
        (("--budget", 1, "--ranks", 4), ["divides the 2 KV heads", "got 4"]),
        (("--budget", 1, "--evenly", 1), ["not allowed with"]),
    ],
)
def test_choose_refuses(longreach: Any, saved: Path, tmp_path: Path, option: tuple[Any, ...], words: list[str]) -> None:
    refused(longreach("plan", "choose", saved, *option, "--output", tmp_path / "q.json"), *words)
    assert not (tmp_path / "q.json").exists()


def test_choose_takes_kascade_plans_only(longreach: Any, tmp_path: Path) -> None:
    mac_plan(MODEL).save(tmp_path / "m.json")
    result = longreach("plan", "choose", tmp_path / "m.json", "--budget", 1, "--output", tmp_path / "q.json")
    refused(result, "is a mac plan")


def test_figures(longreach: Any, saved: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, folder = tmp_path / "book.txt", tmp_path / "figures"
    text.write_text("".join(f"Hen {n} laid {n * n % 97} eggs in barn {n % 7}. " for n in range(80)))
    asked = ["plan", "figures", saved, "--model", model, "--text", text, "--length", 400, "--prompts", 2, "--tiles", 1,
             "--output", folder]  # fmt: skip
    result = longreach(*asked)
    assert result.code == 0, result.err
    assert all(len(line) <= 80 or line.endswith(".png") for line in result.out.splitlines())
    names = {"top", "similarity", "importance", "budgets", "pooling", "mapping", "oracle"}
    assert {p.name for p in folder.iterdir()} == {"kascade.json", *(f"kascade-{name}.png" for name in names)}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in folder.glob("*.png"))
    record = json.loads((folder / "kascade.json").read_text())
    assert record["kind"] == "kascade figures" and record["tokens"] == 800 and record["results"]["tiles"] == 2
    for size, share in zip(record["results"]["sizes"], record["results"]["pooling"]["post"]["weight"], strict=True):
        assert any(line.split()[:1] == [str(size)] and f"{share:.1%}" in line for line in result.out.splitlines())
    oracle = record["results"]["oracle"]
    for share, weight in zip(oracle["shares"], oracle["first_dense"]["weight"], strict=True):
        row = next(line.split() for line in result.out.splitlines() if line.split()[:1] == [f"{share:.1%}"]
                   and len(line.split()) == 7)  # fmt: skip
        assert row[2] == f"{weight:.1%}"
    assert json.loads(longreach(*asked, "--json").out)["results"] == record["results"]
    refused(longreach(*asked, "--length", 200), "200 tokens are too short", "384 tokens are needed")
    refused(longreach(*asked, "--model", "mini"), "another model")
    monkeypatch.setattr("longreach.cli.calibrate.common.load_model", lambda args: 1 / 0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(longreach(*asked), "pip install 'longreach[report]'")


def test_plans_of_every_kind_have_values_that_are_known(longreach: Any, tmp_path: Path) -> None:
    assert set(VALUES) == set(KINDS) == set(VIEWS)
    assert longreach("plan", "verify", "loki-longreach-mini", "--model", "mini").code == 0
    whole = mac_plan(MODEL)
    for values, words in ((whole.values, "window"), ({**whole.values, "gap": 1}, "the unknown value 'gap'")):
        replace(whole, values=values).save(tmp_path / "m.json")
        assert words in (result := longreach("plan", "show", tmp_path / "m.json")).out + result.err


def test_the_shipped_magicpig_plan_goes_with_the_methods_defaults(longreach: Any) -> None:
    assert longreach("plan", "verify", "magicpig-longreach-mini", "--model", "mini").code == 0
    shape = shape_at("mini")
    plan = MagicPIG().plan_for(shape)
    named = MagicPIG(plan="magicpig-longreach-mini").plan_for(shape)
    assert plan is not None and plan is named
    found = plan.expected(plan.chosen)
    assert sum(found["search"]) + sum(found["attention"]) <= plan.budget * shape.layers * 1.000001


def test_large_errors_of_a_magicpig_plan_are_not_cut_off(longreach: Any, tmp_path: Path) -> None:
    """With a large `least` hardly a key is sampled."""
    large = magicpig_plan(MODEL)
    large.arrays["error"][:] = torch.tensor([98.7654, 2243.21, 3.4e7])  # of its three pairs
    large.save(tmp_path / "p.json")
    result = longreach("plan", "show", tmp_path / "p.json")
    assert result.code == 0 and ".." not in result.out
    assert {"98.765", "2243", "3e+07"} <= {*result.out.split()}


def test_the_shipped_plan_is_for_the_shipped_model(longreach: Any) -> None:
    assert longreach("plan", "verify", "kascade-longreach-mini", "--model", "mini").code == 0
    said = json.loads(longreach("plan", "show", "kascade-longreach-mini", "--json").out)
    assert said["model"]["name"] == "longreach-mini" and said["values"]["anchors"][0] == 0
    smaller = json.loads(longreach("plan", "show", "kascade-longreach-mini-0-4", "--json").out)["values"]["anchors"]
    assert (said["values"]["anchors"], smaller) == ([0, 4, 8], [0, 4])
    assert said["made"]["seed"] != 0 and "prose.txt" in said["made"]["data"]  # not what evaluations read
