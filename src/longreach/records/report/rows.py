"""Groups of comparable evaluations, and each method's numbers in them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from longreach.records.record import wilson
from longreach.records.report.blocks import Mark
from longreach.records.report.format import mean
from longreach.records.report.reading import Record

LOST = 0.1
LEVEL = 0.05  # of significance


@dataclass(frozen=True)
class Row:
    """A task at a length, from one record. name: what the record calls it, "TASK@LENGTH" where it has several lengths.

    Older records have one length, in their config, and no more than the task's name.
    """

    record: Record
    name: str
    entry: dict[str, Any]

    @property
    def task(self) -> str:
        return str(self.entry.get("task", self.name))

    @property
    def length(self) -> int:
        return int(self.entry.get("length", self.record["config"]["length"]))

    @property
    def tokens(self) -> float:
        """Of its prompts, on average."""
        return sum(s["tokens"] for s in self.entry["samples"]) / len(self.entry["samples"])

    def result(self, label: str) -> dict[str, Any]:
        return dict(self.entry["results"][label])

    def beside(self, label: str, dense: str | None) -> list[dict[str, Any]]:
        """Answers that did not fail, nor dense's to the same prompt: those of which `diverges_at` tells."""
        others = self.result(dense)["answers"] if dense is not None else []
        failed = {(a["number"], a["draw"]) for a in others if a["error"] is not None}
        mine = self.result(label)["answers"]
        return [a for a in mine if a["error"] is None and (a["number"], a["draw"]) not in failed]

    def pairs(self, label: str, dense: str, numbers: Collection[int] | None = None) -> list[tuple[float, float]]:
        """(score, dense's) of each prompt that both answered, means over its draws. numbers: of these prompts."""
        mine, theirs = by_prompt(self.result(label)), by_prompt(self.result(dense))
        both = [n for n in mine if n in theirs and (numbers is None or n in numbers)]
        return [(mine[n], theirs[n]) for n in both]

    def mark(self, label: str, dense: str | None, numbers: Collection[int] | None = None) -> Mark:
        """How a method's score compares with dense's."""
        return "" if dense is None or label == dense else paired(self.pairs(label, dense, numbers))


@dataclass(frozen=True)
class Group:
    """Rows of one model with the same methods and ways of drawing; they differ in task, length or record."""

    records: tuple[Record, ...]
    rows: tuple[Row, ...]

    @property
    def labels(self) -> list[str]:
        return self.records[0].labels

    @property
    def dense(self) -> str | None:
        return self.records[0].dense

    @property
    def lengths(self) -> list[int]:
        return sorted({row.length for row in self.rows})

    def lost(self, length: int) -> list[str]:
        """Tasks on which no method scores 10% or more; they do not distinguish methods."""
        rows = self.at(length)
        return [row.task for row in rows if max(row.result(x)["score"] for x in self.labels) < LOST]

    def at(self, length: int) -> list[Row]:
        return [row for row in self.rows if row.length == length]

    @property
    def title(self) -> str:
        model = self.records[0]["model"]
        return f"{model['name']} ({model['dtype']}), {', '.join(map(str, self.lengths))} tokens"


def groups(records: Sequence[Record]) -> list[Group]:
    """Group evaluations whose scores are comparable in one table."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.kind == "eval":
            fused = any("fuse" in method for method in record["methods"].values())
            names = ("seed", "draws", "temperature", *(("chunk_tokens", "chunks") if fused else ()))
            config = {name: record["config"].get(name) for name in names}
            config["question"] = record["config"].get("question", "prefill")
            config |= {"chunk_ends": record["config"].get("chunk_ends", "text")} if fused else {}
            key = [record["model"]["sha256"], record["model"]["dtype"], config, list(record["methods"].items())]
            found.setdefault(json.dumps(key, sort_keys=True), []).append(record)
    made = []
    for alike in found.values():
        rows = [Row(record, name, entry) for record in alike for name, entry in record["tasks"].items()]
        made.append(Group(tuple(alike), tuple(sorted(rows, key=lambda row: row.length))))
    return made


@dataclass(frozen=True)
class Summary:
    """A method over all tasks of a length: mean scores and numbers of failures."""

    label: str
    score: float
    interval: tuple[float, float]
    failed: int
    answers: int
    prefill: dict[str, float] | None
    decode: dict[str, float] | None
    read: float | None
    per_token: float | None
    length: float | None
    same: float | None
    mark: Mark


def summary(rows: Sequence[Row], label: str, dense: str | None) -> Summary:
    """The interval of the mean is Wilson's for as many samples as all tasks have; tasks differ less within than all
    samples together, so it is rather too wide."""
    results = [row.result(label) for row in rows]
    score = sum(r["score"] for r in results) / len(results)
    # as many samples as give the mean over tasks its variance: each task's variance counts by its share squared
    samples = len(rows) ** 2 / sum(1 / len(row.entry["samples"]) for row in rows)
    answers = [a for r in results for a in r["answers"]]
    clean = [a for row in rows for a in row.beside(label, dense)]
    same = sum(a["diverges_at"] is None for a in clean) / len(clean) if clean and label != dense else None
    return Summary(
        label=label,
        score=score,
        interval=_wilson(score, samples),
        failed=sum(r["failed"] for r in results),
        answers=len(answers),
        prefill=_reads(r["prefill_reads"] for r in results),
        decode=_reads(r["decode_reads"] for r in results),
        read=mean([r["seconds"]["read"] for r in results]),
        per_token=mean([r["seconds"]["per_token"] for r in results]),
        length=mean([r["length_over_dense"] for r in results]),
        same=same if dense is not None else None,
        mark=paired([pair for row in rows for pair in row.pairs(label, dense)]) if dense not in (None, label) else "",
    )


def paired(pairs: Sequence[tuple[float, float]]) -> Mark:
    """Whether a method scores below or above dense on the same prompts, from (its score, dense's) of each.

    By the sign test, exact and two-sided: how likely a coin decides the prompts on which they differ so unevenly. For
    scores of 0 and 1 it is McNemar's test. The mean must differ to the same side, for it is what the mark stands at.
    """
    apart = [mine - dense for mine, dense in pairs]
    losses, wins = sum(d < 0 for d in apart), sum(d > 0 for d in apart)
    fewer, both = min(losses, wins), losses + wins
    if 2 * sum(comb(both, n) for n in range(fewer + 1)) >= LEVEL * 2**both:
        return ""
    return "worse" if wins < losses and sum(apart) < 0 else "better" if losses < wins and sum(apart) > 0 else ""


def by_prompt(result: dict[str, Any]) -> dict[int, float]:
    """Number of a prompt -> the score of its answer, the mean over draws."""
    draws: dict[int, list[float]] = {}
    for a in result["answers"]:
        draws.setdefault(a["number"], []).append(a["score"])
    return {number: sum(scores) / len(scores) for number, scores in draws.items()}


def _wilson(score: float, samples: float) -> tuple[float, float]:
    total = max(1, round(samples))
    return wilson(min(score * total, total), total)


def _reads(reads: Iterator[dict[str, float] | None]) -> dict[str, float] | None:
    there = [r for r in reads if r]
    return (
        {k: sum(r[k] for r in there) / len(there) for k in ("total", "keys", "values", "metadata")} if there else None
    )
