"""Journals: what is done is on disk, of one run only, and whoever ends the run is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from longreach.records import Journal


def test_who_ends_a_run_early_is_told_that_it_goes_on(tmp_path: Path) -> None:
    def notes(record: Path | None, parts: int) -> list[str]:
        with pytest.raises(KeyboardInterrupt) as raised, Journal(record, {"seed": 0}) as journal:
            for number in range(parts):
                journal.add(str(number), [number])
            raise KeyboardInterrupt
        return list(getattr(raised.value, "__notes__", []))

    path = tmp_path / "r.json"
    assert notes(path, 0) == [] and notes(None, 2) == []
    (told,) = notes(path, 2)
    assert f"{path}.journal" in told and "the same command continues from there" in told
    with Journal(path, {"seed": 0}) as journal:
        assert journal.done == {"0": [0], "1": [1]}
    journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_without_a_record_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Journal(None, {}) as journal:
        journal.add("a", 1)
    journal.remove()
    assert journal.done == {"a": 1} and list(tmp_path.iterdir()) == []
