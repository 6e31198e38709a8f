"""What docs/fusion.md shows runs as it stands there, and names what there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from longreach.methods.registry import EVICTIONS, FUSIONS, fusion_class
from tests.doc_tables import tables

PAGE = (Path(__file__).parent.parent / "docs" / "fusion.md").read_text()
(EXAMPLE,) = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)
TEXT = "The brown hen laid an egg in the hay.\n\nThe access code for the archive is 4815162. The fox slept.\n" * 9


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLE, "fusion.md", "exec"), {})
    told = capsys.readouterr().out
    assert "4815162" in told and "FusionReport(tokens=" in told


def test_the_page_names_every_method() -> None:
    assert all(f"`{name}`" in PAGE for name in FUSIONS) and all(f"--evict {name}" in PAGE for name in EVICTIONS)


def test_the_page_names_every_option_and_its_default() -> None:
    (rows,) = (rows for head, rows in tables(PAGE) if head[0] == "option")
    shown = {
        (method, option): default
        for names, methods, defaults, _ in rows
        for option, default in zip(re.findall(r"`(\w+)`", names), defaults.split(", "), strict=True)
        for method in re.findall(r"`(\w+)`", methods)
    }
    fields = {(name, field.name): field.default for name in FUSIONS for field in dataclasses.fields(fusion_class(name))}
    assert fields.keys() == shown.keys()
    assert {key: str(default) for key, default in fields.items() if default is not None} == {
        key: default.strip("`") for key, default in shown.items() if fields[key] is not None
    }
