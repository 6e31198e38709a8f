"""What attaching costs on a CPU: the record has both ways and their ratios."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from longreach.bench import cpu_attached


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cpu_attached, "TOKENS", 4)
    monkeypatch.setattr(cpu_attached, "WARM", 0)
    cpu_attached.main(["--lengths", "64", "--rounds", "2", "--output", str(tmp_path / "r.json")])
    record = json.loads((tmp_path / "r.json").read_text())
    (case,) = record["cases"]
    for part, each in case["seconds"].items():
        plain, mine = (each[way] for way in ("plain", "attached"))
        assert len(plain) == len(mine) == 2 and min(*plain, *mine) > 0
        assert case["ratios"][part] == pytest.approx(statistics.median(mine) / statistics.median(plain), rel=1e-3)
    assert record["device"]["type"] == "cpu" and "attached" in capsys.readouterr().out
