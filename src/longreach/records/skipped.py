"""The share of keys that MAC skips with natural hits, cited next to measurements with forced hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from longreach.records.record import files, read

WITHIN = 0.01  # of dense attention's mean score


class Skipped(NamedTuple):
    """share: keys not read while decoding, mean over tasks. where: the record's file name."""

    label: str
    share: float
    model: str
    length: int
    where: str


def skipped(results: Path) -> Skipped | None:
    """The longest single-length evaluation in a folder that has MAC, at the loosest threshold within a point of dense.

    Compared are mean scores. None if there is no such evaluation.
    """
    found = [one for path in files(results) if (one := _of(path.name, read(path))) is not None]
    return max(found, key=lambda one: one.length, default=None)


def _of(name: str, record: dict[str, Any]) -> Skipped | None:
    if (
        record.get("kind") != "eval"
        or len(record["config"].get("lengths", ())) != 1
        or "dense" not in record["methods"]
    ):
        return None
    tasks = record["tasks"].values()

    def mean(label: str) -> float:
        return sum(task["results"][label]["score"] for task in tasks) / len(tasks)

    taus = {}
    for label, method in record["methods"].items():
        given = method["decode"]
        alone = set(label.removeprefix("mac").split()) <= {
            f"tau={given.get('tau')}"
        }  # all other options are the defaults
        if given["name"] == "mac" and given["tau"] is not None and alone and mean(label) >= mean("dense") - WITHIN:
            taus[given["tau"]] = label
    if not taus:
        return None
    label = taus[min(taus)]
    reads = [r for task in tasks if (r := task["results"][label]["decode_reads"])]
    share = 1 - sum(2 * r["keys"] for r in reads) / len(reads)
    return Skipped(label, share, record["model"]["name"], record["config"]["length"], name)
