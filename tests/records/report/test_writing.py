"""A report is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.records.report.writing import write_all

FILES = {"a.md": b"new a", "b.png": b"new b"}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_files_are_replaced_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    assert write_all(folder, FILES) == [folder / "a.md", folder / "b.png"]
    (folder / "notes.txt").write_bytes(b"mine")
    write_all(folder, {"a.md": b"newer"})
    assert contents(folder) == {"a.md": b"newer", "b.png": b"new b", "notes.txt": b"mine"}


@pytest.mark.parametrize("fails_at", range(1, 5))
def test_an_error_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    (tmp_path / "a.md").write_bytes(b"old a")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    before, calls, real = contents(tmp_path), iter(range(1, 100)), os.replace

    def replace(source: Any, target: Any) -> None:
        if next(calls) == fails_at:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    if fails_at == 4:  # three replaces are all there are: a.md aside, then both into place
        write_all(tmp_path, FILES)
        assert contents(tmp_path) == {**FILES, "notes.txt": b"mine"}
        return
    with pytest.raises(InvalidInput, match=r"cannot write the report .*No space left.*choose another --output"):
        write_all(tmp_path, FILES)
    assert contents(tmp_path) == before


def test_an_error_or_interrupt_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.write_bytes

    def write(self: Path, content: bytes) -> int:
        if "b.png" in self.name:
            real(self, content[:3])
            raise KeyboardInterrupt
        return real(self, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(KeyboardInterrupt):
        write_all(tmp_path / "new" / "er", FILES)
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "a.md").mkdir(parents=True)
    for folder, word in ((tmp_path / "file", "file"), (tmp_path / "folder", "a.md"), (Path("/proc/none"), "/proc")):
        with pytest.raises(InvalidInput, match="choose another --output") as error:
            write_all(folder, FILES)
        assert word in str(error.value)
    assert contents(tmp_path) == {"file": b""}
