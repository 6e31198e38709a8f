"""`longreach plan break-even` measures on this machine and writes the plan with what it found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longreach.bench import break_even
from longreach.bench.break_even import Compared
from longreach.plans import load, shipped
from tests.cli.plan.test_plan import made, model
from tests.cli.test_bad_input import refused

__all__ = ["model"]  # a fixture
CONTEXTS = "64,128,256"


@pytest.fixture
def saved(model: Path, tmp_path: Path) -> Path:
    made(model).save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_it_measures_and_replaces_the_plan(longreach: Any, saved: Path) -> None:
    before = load(saved, "kascade")
    result = longreach("plan", "break-even", saved, "--contexts", CONTEXTS, "--device", "cpu")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert [line.split()[:2] for line in lines[1:7]] == [
        [phase, n] for phase in ("decode", "prefill") for n in CONTEXTS.split(",")
    ]
    after = load(saved, "kascade")
    found = after.values["dense_below"]["cpu"]
    assert set(found) == {"decode", "prefill"} and all(n in (0, 128, 256, 257) for n in found.values())
    assert {n: x for n, x in after.values.items() if n != "dense_below"} == before.values
    assert all(bool((after.arrays[name] == x).all()) for name, x in before.arrays.items())
    assert "dense attention below" in longreach("plan", "show", saved).out


def test_other_devices_keep_their_values(
    longreach: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report and the method's choice follow the plan: here Kascade is faster from 128 tokens on."""
    monkeypatch.setattr(
        break_even, "compare", lambda plan, path, phase, context, *_: Compared(context, 1.0, context / 100)
    )
    base = load(saved, "kascade")
    replace(base, values={**base.values, "dense_below": {"a GPU": {"decode": 7}, "cpu": {"decode": 9}}}).save(saved)
    output = tmp_path / "new.json"
    result = longreach(
        "plan", "break-even", saved, "--contexts", CONTEXTS, "--out", output, "--device", "cpu", "--json"
    )
    assert result.code == 0, result.err
    said = json.loads(result.out)
    assert said["dense_below"] == {"decode": 128, "prefill": 128} and len(said["seconds"]["prefill"]) == 3
    values = load(output, "kascade").values["dense_below"]
    assert values == {"a GPU": {"decode": 7}, "cpu": {"decode": 128, "prefill": 128}}
    assert load(saved, "kascade").values["dense_below"]["cpu"] == {"decode": 9}, "only --output is written"
    shown = " ".join(longreach("plan", "show", output).out.split())
    assert "prefill on cpu: dense attention below 128 tokens, where it is faster" in shown


def test_a_plan_for_decode_only_has_no_prefill(longreach: Any, saved: Path) -> None:
    base = load(saved, "kascade")
    replace(base, values={name: x for name, x in base.values.items() if name != "tile"}).save(saved)
    result = longreach("plan", "break-even", saved, "--contexts", "64", "--device", "cpu", "--json")
    assert result.code == 0 and set(json.loads(result.out)["dense_below"]) == {"decode"}


def test_bad_input(longreach: Any, saved: Path, tmp_path: Path) -> None:
    name = next(iter(shipped("kascade")))
    refused(longreach("plan", "break-even", name, "--contexts", "64"), "is a shipped plan, which is not replaced")
    refused(longreach("plan", "break-even", next(iter(shipped("loki")))), "only those of kascade have a break-even")
    for text in ("0", "1,64", "many", ""):
        refused(longreach("plan", "break-even", saved, "--contexts", text), "expected numbers of tokens such as")
    (tmp_path / "file").write_text("no folder")
    where = tmp_path / "file" / "x.json"
    refused(longreach("plan", "break-even", saved, "--contexts", "64", "--device", "cpu", "--out", where), str(where))
