"""Plans by path, by name, by model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from longreach.errors import InvalidInput
from longreach.plans import KINDS, default_file, find, finding, load, shipped
from tests.plans.factory import MODEL, plan


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose shipped plans are two of kind mac."""
    folder = tmp_path / "plans" / "shipped"
    plan().save(folder / "mac-some.json")
    plan(model=replace(MODEL, name="other", config="beef" * 16)).save(folder / "mac-other.json")
    monkeypatch.setattr(finding, "files", lambda package: tmp_path)
    return folder


def test_by_model(shelf: Path) -> None:
    other = replace(MODEL, config="beef" * 16)
    assert find("mac", None, MODEL).model.name == "some-model" and find("mac", None, other).model.name == "other"
    assert set(shipped("mac")) == {"mac-some", "mac-other"} and shipped("loki") == {}


def test_by_name_and_path(shelf: Path, tmp_path: Path) -> None:
    plan().save(tmp_path / "mine.json")
    assert find("mac", "mac-some", MODEL).model.name == "some-model"
    assert find("mac", str(tmp_path / "mine.json"), MODEL) is load(tmp_path / "mine.json", "mac")


@pytest.mark.parametrize("name", ["mac-other", "mac-other.json"])
def test_another_models_plan_is_refused(shelf: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(shelf)
    with pytest.raises(InvalidInput, match=f"the plan {name} is for other"):
        find("mac", name, MODEL)


def test_what_is_not_there_is_told_with_the_command_that_makes_it(shelf: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no loki plan.*shipped: none.*longreach calibrate loki .*plan=plan.json"):
        find("loki", None, MODEL)
    with pytest.raises(InvalidInput, match=r"no mac plan.*feed.*mac-other, mac-some"):
        find("mac", None, replace(MODEL, config="feed" * 16))
    with pytest.raises(InvalidInput, match=r"no plan 'mac-none'.*mac-other, mac-some"):
        find("mac", "mac-none", MODEL)


def test_a_shipped_plan_of_the_right_configuration_and_wrong_heads_is_refused(shelf: Path) -> None:
    with pytest.raises(InvalidInput, match=r"the plan mac-some.*query heads 4 expected, 2 came"):
        find("mac", None, replace(MODEL, query_heads=2))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shipped_can_be_loaded_and_has_one_default_a_model(kind: str) -> None:
    for name, path in shipped(kind).items():
        model = load(path, kind).model
        assert default_file(kind, model) == shipped(kind)[f"{kind}-{model.name}"]
        assert name == f"{kind}-{model.name}" or name.startswith(f"{kind}-{model.name}-")


def test_variants_are_used_by_name() -> None:
    model = load(shipped("kascade")["kascade-longreach-mini"], "kascade").model
    anchors = [find("kascade", plan, model).values["anchors"] for plan in (None, "none", "kascade-longreach-mini-0-4")]
    assert anchors == [[0, 4, 8], [0, 4, 8], [0, 4]]


@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_is_made_outside_a_session(kind: str) -> None:
    with pytest.raises(InvalidInput, match=f"plan=auto: plans for kascade and loki are made of a prompt.*{kind} needs"):
        find(kind, "auto", MODEL)
