"""Reading data set files: what is wrong with one is said with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longreach.errors import InvalidInput

Entry = tuple[str, dict[str, Any]]  # (its place, for messages; its fields)
NAMES = {str: "a text", int: "a number", list: "a list of texts"}


def entries(path: Path) -> Iterator[Entry]:
    """The objects of a JSONL file, one a line, or of a JSON list. Raises InvalidInput, naming file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path given to --tasks") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 (byte {error.start}); fetch it again") from error
    if text.lstrip().startswith("["):
        objects = [(f"{path}, entry {n}", one) for n, one in enumerate(_parsed(path, text, 1), 1)]
    else:  # not splitlines: texts may hold other line separators
        lines = enumerate(text.split("\n"), 1)
        objects = [(f"{path}, line {n}", _parsed(path, line, n)) for n, line in lines if line.strip()]
    if not objects:
        raise InvalidInput(f"{path} is empty; expected JSON objects, one a line")
    for place, one in objects:
        if not isinstance(one, dict):
            raise InvalidInput(f"{place}: expected a JSON object, got {json.dumps(one)[:40]}")
        yield place, one


def _parsed(path: Path, text: str, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        raise InvalidInput(f"{path}, line {at}: no valid JSON ({error.msg}); fetch the file again") from error


def check_fields(entry: Entry, fields: Mapping[str, type]) -> None:
    """Raise InvalidInput, naming place and field, where one is missing or of another type."""
    place, values = entry
    for name, kind in fields.items():
        if name not in values:
            raise InvalidInput(f"{place}: the field {name!r} is missing; is it the official file?")
        value = values[name]
        good = isinstance(value, kind) and not isinstance(value, bool)
        good = good and (kind is not list or (bool(value) and all(isinstance(v, str) for v in value)))
        if not good:
            raise InvalidInput(f"{place}: the field {name!r} should be {NAMES[kind]}, got {json.dumps(value)[:40]}")
        try:
            "".join(value if kind is list else [str(value)]).encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(f"{place}: the field {name!r} holds half a character ({error.reason})") from error
