"""The examples run, and their output is right."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from longreach.testing.tiny import save_tiny

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """`run(name, *arguments)`: what the example prints."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def share(line: str) -> float:
    return float(re.findall(r"([\d.]+)%", line)[-1])


def test_every_example_is_tested_and_says_how_to_run_it() -> None:
    tested = {"ask_a_file", "ask_documents", "attend_alone", "compare_methods", "convert_and_heal", "many_questions"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
    for path in EXAMPLES.glob("*.py"):
        assert f"\nRun: python examples/{path.name}" in path.read_text()


def test_the_notebook_runs() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    cells = json.loads((EXAMPLES / "what_methods_read.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert not cell.get("outputs"), "clear the outputs before it is committed"
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["answer"].strip().startswith("7391") and len(names["found"]) == 6
    assert {one.label.split()[0] for one in names["found"] if one.first_divergence is not None} == {"streaming_llm"}


def test_ask_a_file(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    filler = "The brown hen laid an egg in the hay. " * 20
    (tmp_path / "notes.txt").write_text(f"{filler}The access code for the archive is 4815162. {filler[:150]}")
    out = run("ask_a_file", tmp_path / "notes.txt", "What is the access code for the archive?").splitlines()
    assert out[0] == "4815162" and 30.0 <= share(out[1]) < 40.0


def test_ask_documents(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("The boats left at noon for the island. " * 80)
    filler = "The brown hen laid an egg in the hay. " * 40
    (tmp_path / "b.txt").write_text(f"{filler}The access code for the barn is 4815162. {filler}")
    first, again = (
        run("ask_documents", "What is the access code for the barn?", "a.txt", "b.txt").splitlines() for _ in range(2)
    )
    assert first[0] == again[0] == "4815162"
    stored, computed = map(int, re.findall(r"\d+", first[1]))
    assert stored == 0 < computed and again[1] == f"chunks: {computed} stored, 0 computed"
    total, reused = map(int, re.findall(r"\d+", again[2]))
    assert 0.8 < reused / total < 0.86 and again[2] == first[2]


def test_many_questions(run) -> None:  # type: ignore[no-untyped-def]
    out = run("many_questions").splitlines()
    assert re.match(r"read \d+ tokens", out[0])
    assert [line.split(" (")[0] for line in out[1:]] == ["archive: 4815162", "barn: 2342108", "tower: 1618033"]


def test_compare_methods(run, tiny: Path) -> None:  # type: ignore[no-untyped-def]
    out = run("compare_methods", tiny).splitlines()
    assert out[0].startswith("dense: ") and share(out[0]) == 100.0
    assert 2.0 < share(out[1]) < 5.0  # 68 of about 2000 tokens
    assert 10.0 < share(out[2]) < 10.5 and share(out[3]) > 100.0
    assert out[4].startswith("phase") and out[-2].startswith("decode: ")
    assert out[-1].startswith("model.generate: steps were not captured") or torch.cuda.is_available()


def test_attend_alone(run) -> None:  # type: ignore[no-untyped-def]
    some, merged, second = run("attend_alone").splitlines()
    assert float(some.split()[-1]) > 0.01 and float(merged.split()[-1]) < 1e-6
    assert 0.4 < float(second.split()[-1]) < 0.6


def test_convert_and_heal(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = save_tiny(tmp_path / "tiny")
    out = run("convert_and_heal", model, 2, tmp_path / "healed").splitlines()
    assert [line.split(": KL ")[0] for line in out[:2]] == ["converted", "after 2 steps"]
    assert all(0 < float(line.split("KL ")[1].split(",")[0]) < 10 and 0 <= share(line) < 100 for line in out[:2])
    assert out[2].startswith(f"written to {tmp_path / 'healed'}: ") and (tmp_path / "healed" / "config.json").is_file()
