"""`longreach fusion`: tables, the record, bad input in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.records.labels import short_label
from tests.cli.test_bad_input import refused


def asked(model: Path, *more: Any) -> list[Any]:
    return ["fusion", "--model", model, "--tasks", "needle_sweep", "--length", 500, "--samples", 1, "--chunk-tokens",
            100, *more]  # fmt: skip


def test_tables_and_record(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    record = tmp_path / "f.json"
    result = longreach(*asked(tiny, "--output", record, "--chunks", "alone", "--set", "fuse.ratio=0.3"))
    assert result.code == 0, result.err
    assert all(len(line) <= 80 for line in result.out.splitlines())
    found = json.loads(record.read_text())
    assert found["kind"] == "fusion" and found["config"]["chunks"] == "alone" and len(found["model"]["sha256"]) == 64
    assert found["config"]["layers"]["attention"] == [1] and "commit" in found
    assert list(found["methods"])[:2] == ["dense fuse=full_reuse", "dense fuse=pie"] and len(found["methods"]) == 9
    assert found["methods"]["dense fuse=a3 fuse.ratio=0.3"]["fuse"]["ratio"] == 0.3
    assert [s["task"] for s in found["samples"]] == ["needle_sweep"] and found["samples"][0]["chunks"]
    for label, mine in found["results"].items():
        assert short_label(label) in result.out and all(len(layers) == 2 for layers in mine["layers"].values())
    drawn = longreach("report", record, "--output", tmp_path / "out")
    assert drawn.code == 0, drawn.err
    shown = (tmp_path / "out" / "report.md").read_text()
    assert "fusion-layers.png" in shown and f"{found['results']['dense fuse=pie']['layers']['value'][1]:.3g}" in shown
    again = json.loads(longreach(*asked(tiny, "--json", "--chunks", "alone", "--set", "fuse.ratio=0.3")).out)
    assert again["results"] == found["results"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--method", "dense"], ["no fusion method"]),
        (["--method", "dense fuse=x"], ["unknown fuse method 'x'", "oracle"]),
        (["--method", "dense fuse=row_order"], ["layer by layer", "longreach eval takes it"]),
        (["--chunks", "none"], ["--chunks", "system"]),
        (["--length", "99999"], ["context is"]),
        (["--tasks", "needles2"], ["unknown task"]),
    ],
)
def test_what_cannot_be_measured_is_refused(longreach: Any, tiny: Path, more: list[str], words: list[str]) -> None:
    refused(longreach(*asked(tiny, *more)), *words)
