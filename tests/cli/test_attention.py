"""`longreach attention`: tables, a record that reports read, pictures, bad input in words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from longreach.records.report.reading import load
from longreach.testing.tiny import save_tiny
from tests.cli.test_bad_input import refused

NAMES = ("sinks", "recent", "distance", "top", "top-k", "retrieval", "needle", "queries", "match", "agreement")


def asked(model: Path, *more: Any) -> list[Any]:
    return ["attention", "--model", model, "--length", 901, "--samples", 1, "--rows", 3, *more]


def test_tables_record_and_pictures(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    record, figures = tmp_path / "a.json", tmp_path / "figures"
    result = longreach(*asked(tiny, "--output", record, "--figures", figures))
    assert result.code == 0, result.err
    assert all(len(line) <= 80 or line.endswith(".png") for line in result.out.splitlines())
    found = load(record).content
    for kind, count in (("text", 6), ("answer", 14)):  # two prompts, an answer of seven bytes each
        assert found["results"]["rows"][kind]["count"] == count and f"-- {count} rows of the {kind}" in result.out
        sinks = found["results"]["rows"][kind]["sinks"]
        assert f"{sum(sinks[1]) / 4:.1%}" in result.out
    assert found["config"] == {"length": 901, "samples": 1, "rows": 3, "seed": 0, "prefill_chunk_size": 512}
    assert found["model"]["name"] == "tiny" and len(found["model"]["sha256"]) == 64 and "commit" in found
    assert {p.name for p in figures.iterdir()} == {f"attention-{name}.png" for name in NAMES}
    assert "window" not in result.out and "v. sink" not in result.out
    report = longreach("report", record, "--output", tmp_path / "report", "--json")
    assert report.code == 0, report.err
    written = {Path(p).name for p in json.loads(report.out)["written"]}
    assert written == {"report.md", "report.html", *(f"attention-{name}.png" for name in NAMES)}
    drawn = [(folder / "attention-sinks.png").read_bytes() for folder in (figures, tmp_path / "report")]
    assert drawn[0] == drawn[1]
    for page in ("report.md", "report.html"):
        text = (tmp_path / "report" / page).read_text()
        assert "Attention: tiny (float32), 901 tokens" in text and "Retrieval heads" in text


@pytest.mark.sweep
def test_json_and_other_seeds(longreach: Any, tiny: Path) -> None:
    first, again, other = (json.loads(longreach(*asked(tiny, "--json", *more)).out) for more in ([], [], ["--seed", 1]))
    assert first["results"] == again["results"] and first["kind"] == "attention"
    assert other["results"] != first["results"] and other["samples"] != first["samples"]


def test_windows_and_virtual_sinks_have_columns(longreach: Any, tmp_path: Path) -> None:
    result = longreach(*asked(save_tiny(tmp_path / "sunk", "gpt_oss")))
    assert result.code == 0, result.err
    header = next(line for line in result.out.splitlines() if line.startswith("layer"))
    assert "window" in header and "v. sink" in header
    assert [line.split()[1] for line in result.out.splitlines() if line.split()[:1] in (["0"], ["1"])][:2] == [
        "16",
        "-",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--length", 5000], ["context is 4096"]),
        (["--length", 200], ["niah_single_2"]),
        (["--samples", 0], ["at least 1", "--samples"]),
        (["--rows", 0], ["at least 1", "--rows"]),
        (["--rows", 4000], ["got 4000", "lower --rows"]),
        (["--output", "/proc/none/a.json"], ["cannot write /proc/none", "--output"]),
        (["--figures", "/proc/none"], ["cannot write pictures to /proc/none", "--figures"]),
        (["--prefill-chunk-size", 0], ["at least 1"]),
    ],
)
def test_bad_input(longreach: Any, tiny: Path, more: list[Any], words: list[str]) -> None:
    refused(longreach(*asked(tiny, *more)), *words)


def test_matplotlib_is_asked_for_before_anything_is_measured(
    longreach: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.cli.attention.load_model", lambda args: 1 / 0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(longreach(*asked(tiny, "--figures", tmp_path / "f")), "pip install 'longreach[report]'")
    assert not (tmp_path / "f").exists()


def test_without_matplotlib_tables_and_records_are_made(
    longreach: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = longreach(*asked(tiny, "--output", tmp_path / "a.json"))
    assert result.code == 0 and (tmp_path / "a.json").is_file()
