"""Plans come back from disk as they were saved; whatever is wrong with a file is refused by name."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from longreach.errors import InvalidInput
from longreach.plans import Plan, load, writing
from tests.plans.factory import plan


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "p.json"
    plan().save(path)
    return path


def arrays_of(path: Path) -> Path:
    (found,) = path.parent.glob("*.safetensors")
    return found


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


def same(one: Plan, other: Plan) -> bool:
    equal = one.kind == other.kind and one.model == other.model and one.made == other.made
    arrays = one.arrays.keys() == other.arrays.keys() and all(
        torch.equal(x, other.arrays[n]) and x.dtype == other.arrays[n].dtype for n, x in one.arrays.items()
    )
    return equal and arrays and one.values == other.values


def test_round_trip(saved: Path) -> None:
    assert same(load(saved, "mac"), plan())
    assert {p.name for p in saved.parent.iterdir()} == {"p.json", arrays_of(saved).name}
    assert arrays_of(saved).name.startswith("p.")
    assert '"shape": [3, 2]' in saved.read_text() and len(saved.read_text().splitlines()) < 90


def test_small_plans_are_one_file(tmp_path: Path) -> None:
    small = plan(arrays={"x": torch.tensor([0.1, 1e-30], dtype=torch.float32)})
    small.save(tmp_path / "p.json")
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
    assert same(load(tmp_path / "p.json", "mac"), small)


def test_a_plan_written_anew_is_the_new_one_and_leaves_no_arrays_behind(saved: Path) -> None:
    first = load(saved, "mac")
    other = plan(arrays={"large": torch.ones(5000)})
    other.save(saved)
    assert same(load(saved, "mac"), other) and not same(first, other)
    assert len(list(saved.parent.iterdir())) == 2
    plan(arrays={}).save(saved)
    assert [p.name for p in saved.parent.iterdir()] == ["p.json"]


@pytest.mark.parametrize("dies_at", [1, 2])
def test_a_crash_leaves_the_old_plan_whole(saved: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
    replaced, real = [], os.replace

    def dies(part: Path, path: Path) -> None:
        replaced.append(path)
        if len(replaced) == dies_at:
            raise KeyboardInterrupt
        real(part, path)

    monkeypatch.setattr(writing.os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        plan(arrays={"large": torch.ones(5000)}).save(saved)
    monkeypatch.undo()
    assert same(load(saved, "mac"), plan())


def test_it_is_read_once(saved: Path) -> None:
    first = load(saved, "mac")
    assert load(str(saved), "mac") is first
    os.utime(saved, ns=(1, 1))
    assert load(saved, "mac") is not first


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "format": (lambda d: d.update(format=2), ["format: expected 1, got 2"]),
    "no format": (lambda d: d.pop("format"), ["format: expected 1, got None"]),
    "kind": (lambda d: d.update(kind="loki"), ["plan for mac", "'loki'"]),
    "missing": (lambda d: d.pop("made"), ["lacks the field 'made'"]),
    "missing inside": (lambda d: d["model"].pop("kv_heads"), ["model lacks the field 'kv_heads'"]),
    "missing in made": (lambda d: d["made"].pop("sha256"), ["made lacks the field 'sha256'"]),
    "unknown": (lambda d: d.update(more=1), ["unknown field 'more'", "known: format"]),
    "unknown inside": (lambda d: d["model"].update(heads=1), ["model has the unknown field 'heads'"]),
    "type": (lambda d: d.update(values=[1]), ["'values'", "expected an object, got a list"]),
    "type inside": (lambda d: d["model"].update(layers="4"), ["'layers'", "expected a whole number, got a text"]),
    "truth is no number": (lambda d: d["model"].update(layers=True), ["'layers'", "got a truth value"]),
    "no layers": (lambda d: d["model"].update(layers=0), ["model.layers: expected at least 1"]),
    "null": (lambda d: d["made"].update(data=None), ["'data'", "expected a text, got null"]),
    "dtype": (lambda d: d["arrays"]["small"].update(dtype="object"), ["array 'small'", "dtype", "'object'"]),
    "shape": (lambda d: d["arrays"]["small"].update(shape=[-1, 2]), ["array 'small'", "shape"]),
    "too few": (lambda d: d["arrays"]["small"]["numbers"].pop(), ["array 'small'", "expected 6 numbers"]),
    "no numbers": (lambda d: d["arrays"]["counts"].update(numbers=[1.5, 2]), ["array 'counts'", "numbers of int32"]),
    "too large": (lambda d: d["arrays"]["counts"].update(numbers=[1, 2**40]), ["array 'counts'", "int32 holds"]),
    "array's field": (lambda d: d["arrays"]["small"].pop("shape"), ["array 'small' lacks the field 'shape'"]),
    "not stored": (lambda d: d["arrays"]["small"].update(numbers=None), ["array 'small' is missing"]),
    "stored besides": (lambda d: d["arrays"].pop("large"), ["holds large"]),
    "other shape": (lambda d: d["arrays"]["large"].update(shape=[128, 40]), ["array 'large'", "stored"]),
    "elsewhere": (lambda d: d["file"].update(name="../p.safetensors"), ["file.name", "'../p.safetensors'"]),
    "other sum": (lambda d: d["file"].update(sha256="0" * 64), ["damaged"]),
    "not finite": (lambda d: d["values"].update(word=float("nan")), ["values.word", "nan"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(saved: Path, name: str) -> None:
    change, words = BAD[name]
    with pytest.raises(InvalidInput) as error:
        load(changed(saved, change), "mac")
    for word in (*words, str(saved)):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "JSON"), (b"{", "JSON"), (b"\xff\xfe", "JSON"), (b"[" * 100_000, "JSON"), (b"[]", "expected an object"),
     (pickle.dumps({"format": 1}), "JSON")],
)  # fmt: skip
def test_what_is_no_plan_at_all(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(InvalidInput, match=word):
        load(tmp_path / "p.json", "mac")


def test_missing_files(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no plan at .*no.json"):
        load(tmp_path / "no.json", "mac")
    with pytest.raises(InvalidInput, match="cannot read the plan"):
        load(tmp_path, "mac")
    arrays_of(saved).unlink()
    with pytest.raises(InvalidInput, match="keep both files together"):
        load(saved, "mac")


def test_damaged_arrays(saved: Path) -> None:
    content = bytearray(arrays_of(saved).read_bytes())
    content[-1] ^= 1
    arrays_of(saved).write_bytes(content)
    with pytest.raises(InvalidInput, match="damaged"):
        load(saved, "mac")


def test_arrays_of_another_plan(saved: Path) -> None:
    save_file({"large": torch.ones(40, 128)}, arrays_of(saved))
    with pytest.raises(InvalidInput, match="damaged"):
        load(saved, "mac")


def test_a_place_that_cannot_be_written() -> None:
    with pytest.raises(InvalidInput, match=r"cannot write /proc/none/p.json"):
        replace(plan(), arrays={}).save(Path("/proc/none/p.json"))
