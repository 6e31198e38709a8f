"""`longreach sampling`: tables, a record that reports read, pictures, bad input in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.records.report.reading import load
from tests.cli.test_bad_input import refused

NAMES = ("bytes", "layers", "estimators", "geometry", "mass")


def asked(model: Path, *more: Any) -> list[Any]:
    return ["sampling", "--model", model, "--tasks", "niah_single_2", "--length", 900, "--samples", 1, "--rows", 2,
            *more]  # fmt: skip


def test_tables_record_and_pictures(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    record, figures = tmp_path / "s.json", tmp_path / "figures"
    result = longreach(*asked(tiny, "--output", record, "--figures", figures))
    assert result.code == 0, result.err
    assert all(len(line) <= 80 or line.endswith(".png") for line in result.out.splitlines())
    found = load(record).content
    mine = found["results"]["methods"]["magicpig bits=8 tables=75 share=own"]
    row = next(line for line in result.out.splitlines() if line.startswith("magicpig bits=8 tables=75 share=own"))
    assert f"{mine['mean']:.3f}" in row and f"{mine['reads']['total']:.1%}" in row
    rows = [line for line in result.out.splitlines() if line.startswith("magicpig bits=10 tables=150 ")]
    assert [row.split("tables=150 ")[1].rsplit(maxsplit=4)[0].strip() for row in rows] == [
        "share=own", "share=group", "group, centre=0", "group, no weights",
    ]  # fmt: skip
    assert "kascade was left out" in result.out and "2 rows of 1 prompts" in result.out
    assert found["config"] == {"length": 900, "samples": 1, "rows": 2, "seed": 0, "ablations": True,
                               "prefill_chunk_size": 512, "centre": 225}  # fmt: skip
    assert found["model"]["name"] == "tiny" and len(found["model"]["sha256"]) == 64 and "commit" in found
    assert {p.name for p in figures.iterdir()} == {f"sampling-{name}.png" for name in NAMES}
    report = longreach("report", record, "--output", tmp_path / "report", "--json")
    assert report.code == 0, report.err
    written = {Path(p).name for p in json.loads(report.out)["written"]}
    assert written == {"report.md", "report.html", *(f"sampling-{name}.png" for name in NAMES)}
    assert "Sampling: tiny (float32), 900 tokens" in (tmp_path / "report" / "report.md").read_text()


def test_json_without_ablations(longreach: Any, tiny: Path) -> None:
    result = longreach(*asked(tiny, "--json", "--no-ablations", "--centre", 100))
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["kind"] == "sampling" and found["config"]["centre"] == 100
    assert found["results"]["fitted"]["pairs"] == []
    assert "magicpig bits=9 tables=120 share=group" in found["results"]["methods"]
    assert "magicpig bits=7 tables=120 share=group" not in found["results"]["methods"]


def test_error_bars(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    record = tmp_path / "b.json"
    result = longreach(*asked(tiny, "--error-bars", 2, "--seed", 3, "--output", record))
    assert result.code == 0, result.err
    assert all(len(line) <= 80 for line in result.out.splitlines())
    found = json.loads(record.read_text())
    assert found["kind"] == "error bars" and "commit" in found and found["tasks"].keys() == {"niah_single_2"}
    assert found["config"] == {"length": 900, "samples": 1, "rows": 2, "seed": 3, "error_bars": 2,
                               "prefill_chunk_size": 512, "centre": 225}  # fmt: skip
    label = "magicpig bits=10 tables=75 share=group"
    mine = found["results"][label]["all"]
    row = next(line for line in result.out.splitlines() if line.startswith(label))
    assert row.split()[-5:-1] == [f"{mine['error']:.3f}", f"{mine['bar']:.3f}", f"{mine['ratio']:.2f}",
                                  f"{mine['covered']:.1%}"]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--rows", "0"], ["--rows", "at least 1"]),
        (["--seed", "-1"], ["--seed", "at least 0"]),
        (["--length", "99999"], ["context is"]),
        (["--centre", "800"], ["niah_single_2", "lower --rows or --centre (now 800)"]),
        (["--tasks", "needles2"], ["unknown task"]),
        (["--output", "/proc/x/y.json"], ["cannot write", "--output"]),
        (["--error-bars", "0"], ["--error-bars", "at least 1"]),
        (["--error-bars", "1", "--figures", "x"], ["--figures: has no effect with --error-bars"]),
        (["--error-bars", "1", "--no-ablations"], ["--no-ablations: has no effect with --error-bars"]),
        (["--figures", "/proc/x"], ["cannot write pictures", "--figures"]),
    ],
)
def test_what_cannot_be_measured_is_refused(longreach: Any, tiny: Path, more: list[str], words: list[str]) -> None:
    refused(longreach(*asked(tiny, *more)), *words)
