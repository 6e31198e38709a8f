"""`longreach plan figures` of mac plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longreach.adapters.transformers import load, shape_of
from longreach.methods.mac.plan import MACPlan
from longreach.plans import Plan, PlannedModel
from longreach.testing.tiny import save_tiny
from tests.cli.test_bad_input import refused
from tests.methods.planned import MADE

NAMES = {
    "threshold-sqrt2d", "threshold-calibrated", "window-sqrt2d", "window-calibrated", "band", "gap", "trade",
    "window-band-error", "window-band-read", "matching",
}  # fmt: skip


ALONE_OR_NOT = (("--depth", 2), ("--depth", 2, "--depth", 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "three", num_hidden_layers=3)


@pytest.fixture
def asked(model: Path, tmp_path: Path) -> list[Any]:
    """The command, of a plan for the model and a text."""
    shape = shape_of(load(model)[0])
    energy = torch.rand(3, shape.kv_heads, shape.head_dim, generator=torch.Generator().manual_seed(0))
    view = MACPlan((64,) * 3, (8, None, 8), {"sqrt2d": (0.2,) * 3, "calibrated": (0.1,) * 3}, energy, 0)
    Plan("mac", PlannedModel.of("three", shape), view.values(), MADE, view.arrays()).save(tmp_path / "p.json")
    text = tmp_path / "book.txt"
    text.write_text("".join(f"Hen {n} laid {n * n % 97} eggs in barn {n % 7}. " for n in range(40)))
    return ["plan", "figures", tmp_path / "p.json", "--model", model, "--text", text, "--length", 160, "--prompts", 2,
            "--rows", 5, "--window", 64, "--band", 8, "--tau", 0.1, "--output", tmp_path / "figures"]  # fmt: skip


def test_figures(longreach: Any, asked: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    result = longreach(*asked, "--steps", 8, "--depth", 2)
    assert result.code == 0, result.err
    assert all(len(line) <= 80 or line.endswith(".png") for line in result.out.splitlines())
    names = {*NAMES, "drift", "depths"}
    assert {p.name for p in folder.iterdir()} == {"mac.json", *(f"mac-{name}.png" for name in names)}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in folder.glob("*.png"))
    record = json.loads((folder / "mac.json").read_text())
    found = record["results"]
    assert record["kind"] == "mac figures" and record["tokens"] == 320 and found["rows"] == 10
    assert record["config"]["tau"] == 0.1 and record["config"]["steps"] == 8 and found["windows"] == [32, 64]
    for tau, p in zip(found["taus"], found["thresholds"]["sqrt2d"]["all"], strict=True):
        line = next(x.split() for x in result.out.splitlines() if x.split()[:1] == [f"{tau:g}"] and len(x.split()) == 7)
        assert line[1] == f"{p['accepted']:.1%}" and line[2] == f"{p['skipped']:.1%}"
    for n in range(3):
        line = next(x.split() for x in result.out.splitlines() if x.split()[:1] == [str(n)] and len(x.split()) == 10)
        assert line[1] == f"{found['window']['sqrt2d']['acceptance'][n][-1]:.1%}"
        assert line[2] == f"{found['window']['sqrt2d']['reused'][n]:.1%}"
    assert list(found["drift"]["methods"]) == ["depth 2", "no limit"] and record["config"]["depth"] == [2]
    reads = found["drift"]["methods"]["no limit"]["reads"]
    assert f"keys read {2 * reads['keys']:.1%}, with the ring {reads['total']:.1%}" in " ".join(result.out.split())


@pytest.mark.sweep
def test_the_same_figures_again(longreach: Any, asked: list[Any]) -> None:
    one, two = (json.loads(longreach(*asked, "--steps", 8, *more, "--json").out)["results"] for more in ALONE_OR_NOT)
    assert list(two["drift"]["methods"]) == ["depth 2", "depth 1", "no limit"]
    assert one.pop("drift")["methods"]["depth 2"] == two.pop("drift")["methods"]["depth 2"] and one == two


def test_without_a_generation(longreach: Any, asked: list[Any], tmp_path: Path) -> None:
    result = longreach(*asked, "--steps", 0)
    assert result.code == 0 and "generated" not in result.out, result.err
    assert {p.stem.removeprefix("mac-") for p in (tmp_path / "figures").glob("*.png")} == NAMES


def test_what_does_not_fit(longreach: Any, asked: list[Any]) -> None:
    refused(longreach(*asked, "--length", 60), "60 tokens are too short", "69 tokens are needed")
    refused(longreach(*asked, "--model", "mini"), "another model")
    refused(longreach(*asked, "--tau", 1), "[0, 1)", "got 1.0")
    refused(longreach(*asked, "--steps", 5000), "context is 4096")
    refused(longreach(*asked, "--tiles", 2), "--tiles is for kascade plans")
    refused(longreach(*asked, "--length", 4000), "give more --text")


def test_a_plan_of_another_kind(longreach: Any, asked: list[Any]) -> None:
    refused(longreach("plan", "figures", "loki-longreach-mini", *asked[3:]), "is a loki plan", "kascade and mac plans")
    refused(longreach("plan", "figures", "kascade-longreach-mini", *asked[3:]), "is for mac plans")
