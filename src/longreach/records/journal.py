"""Finished parts of a long run, kept on disk so that an interrupted run can continue."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from longreach.errors import InvalidInput


class Journal:
    """The file RECORD.journal next to a future record: a description of the run, then one line for each finished part.

    record: the future record's path; None to keep nothing on disk. Within `with`, an error gets a note that the run can
    be continued. Raises InvalidInput if the file belongs to another run, is not a journal, or cannot be written.
    """

    def __init__(self, record: Path | None, run: dict[str, Any]):
        self.path = None if record is None else record.with_name(record.name + ".journal")
        self.run = json.loads(json.dumps(run))  # as JSON returns it
        self.done: dict[str, Any] = {}
        if self.path is None:
            return
        try:
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
            if lines and not lines[-1].endswith(b"\n"):  # cut by an interrupt
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
            error.add_note(f"finished parts are in {self.path}: the same command continues from there")

    def add(self, key: str, part: Any) -> None:
        """Add a finished part. It is on disk when this returns."""
        if self.path is not None:
            with self.path.open("a") as stream:
                stream.write(json.dumps([key, part]) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        self.done[key] = json.loads(json.dumps(part))

    def remove(self) -> None:
        """Delete the journal, after the record was written."""
        if self.path is not None:
            self.path.unlink()

    def _take(self, lines: list[bytes]) -> None:
        try:
            run, *parts = [json.loads(line) for line in lines]
            done = {str(key): part for key, part in parts}
        except (ValueError, TypeError) as error:
            raise InvalidInput(
                f"{self.path} is not the journal of a run ({error}); remove it to start again"
            ) from error
        differs = _differing(run, self.run)
        if differs:
            raise InvalidInput(
                f"{self.path} is of an interrupted run that differs in {', '.join(differs)}; repeat that run to finish "
                f"it, remove the file to start again, or choose another --output"
            )
        self.done = done


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    os.replace(part, path)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the fields that differ; "config.seed" for a field of an object."""
    found = []
    for name in sorted({*one, *other}):
        mine, theirs = one.get(name), other.get(name)
        if mine != theirs:
            inner = isinstance(mine, dict) and isinstance(theirs, dict)
            found += [f"{name}.{n}" for n in _differing(mine, theirs)] if inner else [name]  # type: ignore[arg-type]
    return found
