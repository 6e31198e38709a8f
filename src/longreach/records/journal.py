"""Finished parts of a long run on disk, line by line, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from longreach.errors import InvalidInput


class Journal:
    """A file beside the record to come, "RECORD.journal": what run it belongs to, then a line for each part done.

    Raises InvalidInput where it belongs to another run, is no journal, or cannot be written.
    """

    def __init__(self, record: Path, run: dict[str, Any]):
        self.path = record.with_name(record.name + ".journal")
        self.run = json.loads(json.dumps(run))  # as it will be read back
        self.done: dict[str, Any] = {}
        try:
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
            if lines and not lines[-1].endswith(b"\n"):  # the line that an interrupt cut
                lines.pop()
                self._replace(b"".join(lines))
            if lines:
                self._take(lines)
            else:
                self._replace(json.dumps(self.run).encode() + b"\n")
        except OSError as error:
            raise InvalidInput(f"cannot write {self.path}: {error.strerror}; choose another --output") from error

    def add(self, key: str, part: Any) -> None:
        """A part is done; it is on disk when this returns."""
        with self.path.open("a") as stream:
            stream.write(json.dumps([key, part]) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.done[key] = json.loads(json.dumps(part))

    def remove(self) -> None:
        """The record is written."""
        self.path.unlink()

    def _replace(self, content: bytes) -> None:
        part = self.path.with_name(self.path.name + ".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, self.path)

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


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the fields that differ, "config.seed" where an object's do."""
    found = []
    for name in sorted({*one, *other}):
        mine, theirs = one.get(name), other.get(name)
        if mine != theirs:
            inner = isinstance(mine, dict) and isinstance(theirs, dict)
            found += [f"{name}.{n}" for n in _differing(mine, theirs)] if inner else [name]  # type: ignore[arg-type]
    return found
