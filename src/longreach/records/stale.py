"""Records that no longer speak for the code: measured from a dirty tree, or with sources that have changed since."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from longreach.errors import InvalidInput
from longreach.records.kernels import kernel_hash


class Fault(NamedTuple):
    """A record, its part ("" for all of it), and what is wrong with it."""

    path: Path
    part: str
    why: str


def stale(directory: Path) -> list[Fault]:
    """Faults of all records below a folder. Raises InvalidInput where it is none or holds something else."""
    if not directory.is_dir():
        raise InvalidInput(f"{directory} is no folder; name the one that holds the records with --out")
    found = []
    for path in sorted(directory.rglob("*.json")):
        for part, measured in _parts(path):
            found += [Fault(path, part, why) for why in faults(measured)]
    return found


def faults(measured: dict[str, Any]) -> Iterator[str]:
    """What is wrong with one measurement. Records older than the habit of naming a commit are passed over."""
    if "commit" not in measured:
        return
    if not measured["commit"]:
        yield "names no commit; measure it again from a checkout, or with LONGREACH_COMMIT set"
    elif measured.get("dirty"):
        yield f"came from a dirty tree at {measured['commit'][:12]}; commit, then measure it again"
    for operator, measured_hash in measured.get("kernels", {}).items():
        if measured_hash != kernel_hash(operator):
            yield f"the sources of {operator} have changed since; measure it again"


def _parts(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The measurements of a record: one for each case where it holds several."""
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidInput(f"{path} is no JSON: {error}; delete it or restore it") from error
    if not isinstance(record, dict):
        raise InvalidInput(f"{path} is no record: expected a JSON object; move it elsewhere")
    if record.get("kind") == "bench":
        yield from record["cases"].items()
    else:
        yield "", record
