"""Finished parts of a long run on disk, line by line, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from longreach.errors import InvalidInput


class Journal:
    """A file beside the record to come, "RECORD.journal": what run it belongs to, then a line for each part done.

    record: None where no record is asked for; then nothing is kept. Within `with`, who ends the run early is told that
    it can go on.
    Raises InvalidInput where it belongs to another run, is no journal, or cannot be written.
    """

    def __init__(self, record: Path | None, run: dict[str, Any]):
        self.path = None if record is None else record.with_name(record.name + ".journal")
        self.run = json.loads(json.dumps(run))  # as it will be read back
        self.done: dict[str, Any] = {}
        if self.path is None:
            return
        try:
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
            if lines and not lines[-1].endswith(b"\n"):  # the line that an interrupt cut
                lines.pop()
                _replace(self.path, b"".join(lines))
            if lines:
                self._take(lines)
            else:
                _replace(self.path, json.dumps(self.run).encode() + b"\n")
        except OSError as error:
            raise InvalidInput(f"cannot write {self.path}: {error.strerror}; choose another --output") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.path is not None and self.done:
            error.add_note(f"what was done is in {self.path}: the same command goes on where this one stopped")

    def add(self, key: str, part: Any) -> None:
        """A part is done; it is on disk when this returns."""
        if self.path is not None:
            with self.path.open("a") as stream:
                stream.write(json.dumps([key, part]) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        self.done[key] = json.loads(json.dumps(part))

    def remove(self) -> None:
        """The record is written, and nothing is left to be done."""
        if self.path is not None:
            self.path.unlink()

    def _take(self, lines: list[bytes]) -> None:
        try:
            run, *parts = [json.loads(line) for line in lines]
            done = {str(key): part for key, part in parts}
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"{self.path} is no journal of a run ({error}); remove it to start anew") from error
        differs = _differing(run, self.run)
        if differs:
            raise InvalidInput(
                f"{self.path} is of an interrupted run that differs in {', '.join(differs)}; repeat that run to finish "
                f"it, remove the file to start anew, or choose another --output"
            )
        self.done = done


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    os.replace(part, path)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the fields that differ, "config.seed" where an object's do."""
    found = []
    for name in sorted({*one, *other}):
        mine, theirs = one.get(name), other.get(name)
        if mine != theirs:
            inner = isinstance(mine, dict) and isinstance(theirs, dict)
            found += [f"{name}.{n}" for n in _differing(mine, theirs)] if inner else [name]  # type: ignore[arg-type]
    return found
