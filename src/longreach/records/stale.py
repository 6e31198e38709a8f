"""Records that no longer hold: from a dirty tree, of sources that have changed since, of other weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from longreach.errors import InvalidInput
from longreach.records.kernels import PACKAGE, SOURCES, kernel_hash
from longreach.records.record import files, read
from longreach.records.weights import weights_sha256


class Fault(NamedTuple):
    """A record, its part ("" for all of it), and what is wrong with it."""

    path: Path
    part: str
    why: str


def stale(directory: Path) -> list[Fault]:
    """Faults of all records below a folder; what is no record is one. Raises InvalidInput where it is no folder."""
    if not directory.is_dir():
        raise InvalidInput(f"{directory} is no folder; name the one that holds the records with --out")
    return [Fault(path, part, why) for path in files(directory) for part, why in _faults_of_file(path)]


def faults(measured: dict[str, Any]) -> Iterator[str]:
    """What is wrong with one measurement."""
    commit, hashes = measured.get("commit"), measured.get("kernels", {})
    if not isinstance(commit, str) or not commit:
        yield "names no commit; measure it again from a checkout, or with LONGREACH_COMMIT set"
    elif measured.get("dirty"):
        yield f"came from a dirty tree at {commit[:12]}; commit, then measure it again"
    for operator, measured_hash in hashes.items() if isinstance(hashes, dict) else ((str(hashes), None),):
        if operator not in SOURCES:
            yield f"measured {operator}, which this version does not know; measure it again"
        elif measured_hash != kernel_hash(operator):
            yield f"the sources of {operator} have changed since; measure it again"


def _faults_of_answers(record: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a record of what a model does, besides: it has no kernels, for all of the code made it."""
    model = record.get("model")
    name = str(model.get("name")) if isinstance(model, dict) else ""
    ours = name and (PACKAGE / "models" / name / "config.json").is_file()
    if ours and record["model"].get("sha256") != _shipped(name):
        yield f"is of other weights than those of {name} that are shipped; measure it again"


@cache
def _shipped(name: str) -> str:
    return weights_sha256(PACKAGE / "models" / name)


def _faults_of_file(path: Path) -> Iterator[tuple[str, str]]:
    """(part, fault): the part is a case where the record holds several."""
    try:
        record = read(path)
    except (OSError, ValueError) as error:
        yield "", f"is no JSON: {error}; delete it or restore it"
        return
    if not isinstance(record, dict):
        yield "", "is no record: expected a JSON object; move it elsewhere"
    elif record.get("kind") != "bench":
        yield from (("", why) for why in (*faults(record), *_faults_of_answers(record)))
    elif not isinstance(cases := record.get("cases"), dict):
        yield "", "is no bench record: expected its cases by name; delete it or restore it"
    else:
        for name, case in cases.items():
            if isinstance(case, dict) and "commit" in case and case.get("kernels"):
                yield from ((name, why) for why in faults(case))
            else:
                yield name, "is no measurement: expected a commit and the hashes of what was measured; measure it again"
