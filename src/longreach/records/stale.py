"""Find records that are out of date: measured from a dirty tree, with other kernels, other sources or other weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from longreach.errors import InvalidInput
from longreach.records.kernels import PACKAGE
from longreach.records.launches import Launch, Launched, outdated
from longreach.records.record import files, read
from longreach.records.sources import SOURCES, source_hash
from longreach.records.weights import weights_sha256

AGAIN = "measure it again"
NO_LAUNCHES = (
    "was measured before records held what was launched; confirm its group on a GPU (longreach bench check --spot "
    "{group}) or measure it again"
)
WITHOUT_LAUNCHES = f"does not hold what was launched, so changes of its kernels cannot be found; {AGAIN}"
UNCONFIRMED = (
    "counts by a spot check that its record no longer holds; confirm its group on a GPU (longreach bench check --spot "
    "{group}) or measure it again"
)


class Fault(NamedTuple):
    """A fault of a record. part: the case, or "" for the whole record. why: the fault, for a message."""

    path: Path
    part: str
    why: str


def stale(directory: Path) -> list[Fault]:
    """Faults of all records below a folder; files that are not records are faults. Raises InvalidInput without one."""
    if not directory.is_dir():
        raise InvalidInput(f"{directory} is no folder; name the one that holds the records with --out")
    return [Fault(path, part, why) for path in files(directory) for part, why in _faults_of_file(path)]


def faults(measured: dict[str, Any]) -> Iterator[str]:
    """Faults of a measurement's origin: commit, dirty tree, hashes of the host code that it measured."""
    commit, hashes = measured.get("commit"), measured.get("sources", {})
    if not isinstance(commit, str) or not commit:
        yield f"names no commit; {AGAIN} from a checkout, or with LONGREACH_COMMIT set"
    elif measured.get("dirty"):
        yield f"came from a dirty tree at {commit[:12]}; commit, then {AGAIN}"
    for name, measured_hash in hashes.items() if isinstance(hashes, dict) else ((str(hashes), None),):
        if name not in SOURCES:
            yield f"measured {name}, which does not exist in this version; {AGAIN}"
        elif measured_hash != source_hash(name):
            yield f"the sources of {name} have changed since; {AGAIN}"


def launches_of(case: dict[str, Any]) -> list[Launch] | None:
    """All Triton launches of longreach's entries of a case; none if all that it measures was left out, None if an entry
    has none recorded.

    Raises KeyError or TypeError if they cannot be read.
    """
    mine = [entry for entry in case.get("entries", ()) if entry.get("who") == "longreach"]
    if not mine and case.get("left_out"):
        return []
    if not mine or any(entry.get("launched") is None for entry in mine):
        return None
    return [launch for entry in mine for launch in Launched.from_json(entry["launched"]).triton]


def faults_of_case(record: dict[str, Any], case: dict[str, Any]) -> Iterator[str]:
    """Faults of a case of a bench record.

    A case that was carried over from an older record has no launches. Those of its group's spot cases are checked.
    """
    yield from faults(case)
    if "sources" in case:
        return
    if "carried_over" in case and "confirmed" not in record:
        yield UNCONFIRMED.format(group=record.get("group"))
        return
    try:
        launches = launches_of(case)
        if "carried_over" in case:
            confirmed = record["confirmed"]
            if confirmed["dirty"]:
                yield f"was confirmed from a dirty tree at {confirmed['commit'][:12]}; commit, then confirm it again"
            if launches is None:
                spots = [launches_of(record["cases"][name]) for name in confirmed["cases"]]
                launches = None if None in spots else [launch for spot in spots for launch in spot or ()]
    except (KeyError, TypeError, AttributeError) as error:
        yield f"holds launches that cannot be read ({type(error).__name__}: {error}); {AGAIN}"
        return
    if launches is None and ("kernels" in case or "carried_over" in case):
        yield NO_LAUNCHES.format(group=record.get("group"))
    elif launches is None:
        yield WITHOUT_LAUNCHES
    else:
        yield from (f"{why}; {AGAIN}" for why in outdated(launches))


def _faults_of_answers(record: dict[str, Any]) -> Iterator[str]:
    """Further faults of a record of model outputs. Kernels are not compared, since all of the code takes part."""
    model = record.get("model")
    name = str(model.get("name")) if isinstance(model, dict) else ""
    ours = name and (PACKAGE / "models" / name / "config.json").is_file()
    if ours and record["model"].get("sha256") != _shipped(name):
        yield f"is of other weights than those of {name} that are shipped; {AGAIN}"


@cache
def _shipped(name: str) -> str:
    return weights_sha256(PACKAGE / "models" / name)


def _faults_of_file(path: Path) -> Iterator[tuple[str, str]]:
    """(part, fault). part: a case of a record with cases, else ""."""
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
            if isinstance(case, dict) and "commit" in case and ("entries" in case or case.get("sources")):
                yield from ((name, why) for why in faults_of_case(record, case))
            else:
                yield name, f"is no measurement: expected a commit and entries with their launches; {AGAIN}"
