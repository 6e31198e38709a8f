"""README's headline, its tables, and the picture of quality against the bytes that methods read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from longreach.bench.case import STEPS
from longreach.bench.record import read as read_cases
from longreach.records.labels import default_note
from longreach.records.record import read
from longreach.records.report.plots.scatter import Point, PointPanel, points

LENGTH = 16384  # tokens of the prompts
SPEEDS = ("steps-128k-b1", "steps-128k-b4")
SCORES = "mini-kascade-16384"
DENSE = "dense"
HEADLINE = ("loki", "kascade")
FORCED = ("mac",)  # its hits were forced for timing


@dataclass(frozen=True)
class Shown:
    """A row of the table. page: its documentation, from the root. record, label: where its score is; None: nowhere."""

    method: str
    page: str | None
    paper: str
    slots: str
    label: str | None
    record: str = SCORES


METHODS = (
    Shown("dense", None, "-", "prefill, decode", "dense"),
    Shown("streaming_llm", None, "[2309.17453](https://arxiv.org/abs/2309.17453)", "prefill, decode",
          "streaming_llm window=0.21367"),
    Shown("kascade", "docs/kascade/README.md", "[2512.16391](https://arxiv.org/abs/2512.16391)", "prefill, decode",
          "kascade plan=benchmarks/plans/kascade-mini-0-4-8.json", "mini-kascade-anchors"),
    Shown("mac", "docs/mac/README.md", "[2604.00235](https://arxiv.org/abs/2604.00235)", "decode", "mac tau=0.75",
          "mini-mac-16384"),
    Shown("magicpig", "docs/magicpig/README.md", "[2410.16179](https://arxiv.org/abs/2410.16179)", "decode", "magicpig",
          "mini-magicpig-group-16384"),
    Shown("loki", "docs/plans.md", "[2406.02542](https://arxiv.org/abs/2406.02542)", "decode", "loki k=0.08738"),
    Shown("quest", None, "[2406.10774](https://arxiv.org/abs/2406.10774)", "decode",
          "quest dense_layers=[0] k=0.07937"),
    Shown("omnikv", None, "Hao et al., ICLR 2025", "decode", "omnikv layers=[0,4] k=0.05577"),
    Shown("less_is_more", None, "[2508.07101](https://arxiv.org/abs/2508.07101)", "decode", "less_is_more k=0.05577"),
    Shown("block_mka", "docs/block_mka.md", "Block-MKA", "prefill, decode", None),
    Shown("oracle_top_k", None, "-", "decode", "oracle_top_k k=0.1 dense_layers=[0]"),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A row of the table of results: what a target of a case got.

    what: in words; over: what it is compared with, in words. case, of, quantity: whose target it is, of a record.
    """

    what: str
    over: str
    record: str
    case: str
    of: str
    quantity: str


RESULTS = (
    Result("attention of a prompt of 128K, 32 layers, `kascade`", "as fast as FlashAttention-3", "kascade-prefill",
           "kascade-prefill-128k-10pct", "kascade", "speed over"),
    Result("first token after a prompt of 128K, `kascade`", "as fast as dense", "first-token", "first-token-128k",
           "kascade", "speed over"),
    Result("decode attention at 128K, batch 32, `magicpig`", "as fast as the fastest dense kernel", "magicpig-decode",
           "magicpig-128k-b32", "(10,75) group", "speed over fastest"),
    Result("a token at 96K, keys and values in host memory, `magicpig`", "as fast as dense over the same link", "host",
           "host-96k-b1", "magicpig (10,75) group", "speed over"),
    Result("first token after 16K of stored documents, `a3`", "as fast as an exact prefill", "fusion", "fusion-16k",
           "a3 0.15", "speed over prefill"),
    Result("a token at 128K, batch 4, in vLLM, `kascade`", "as fast as vLLM's FlashAttention", "vllm-times",
           "tpot-128k", "kascade, batch 4", "speed over"),
    Result("a token of `attach` + `model.generate`, dense, 32K", "the time of `longreach.generate`", "user",
           "user-32k-b1", "attach + model.generate, captured", "time over"),
)  # fmt: skip


@dataclass(frozen=True)
class Score:
    """Mean over tasks, its 95% interval (roughly: the mean of the tasks' intervals), and bytes over dense's.

    dense: the mean of dense attention in the same record. note: a default of its time (`default_note`).
    """

    mean: float
    dense: float
    low: float
    high: float
    reads: float
    note: str = ""


def score(results: Path, row: Shown) -> Score | None:
    """What a method's record holds; None if it has none, or the record is not there."""
    paths = sorted(results.glob(f"{row.record}.json*"))
    if row.label is None or not paths:
        return None
    record = read(paths[0])
    tasks = [task["results"] for task in record["tasks"].values() if task["length"] == LENGTH]
    if any(row.label not in task for task in tasks):
        return None
    found = [task[row.label] for task in tasks]
    bounds = [fmean(one["interval_95"][end] for one in found) for end in (0, 1)]
    reads = fmean(one["decode_reads"]["total"] for one in found)
    mean, dense = (fmean(one["score"] for one in some) for some in (found, [task[DENSE] for task in tasks]))
    note = default_note(record, row.label)
    return Score(mean, dense, bounds[0], bounds[1], reads, f", {note}" if note else "")


def table(results: Path) -> str:
    """Markdown: each method's slots, bytes that its decode step reads, score and time of a step."""
    cases = _steps(results)
    head = [
        "method",
        "paper",
        "slots",
        "bytes",
        "score, of dense's",
        "bytes, timed",
        "step, batch 1",
        "step, batch 4",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in METHODS:
        got = score(results, row)
        name = f"[`{row.method}`]({row.page})" if row.page else f"`{row.method}`"
        told = ["-", "-"] if got is None else [f"{got.reads:.0%}", f"{got.mean:.1%} of {got.dense:.1%}{got.note}"]
        read, times = _timed_reads(cases.get(SPEEDS[0]), row.method), [_over(cases.get(c), row.method) for c in SPEEDS]
        told.append("-" if read is None else f"{read:.0%}")
        lines.append(f"| {' | '.join([name, row.paper, row.slots, *told, *times])} |")
    return "\n".join(lines)


def measured(results: Path) -> str:
    """Markdown: what the targets of RESULTS got, and the records that hold it."""
    lines = ["| measured | | record |", "|---|---|---|"]
    for row in RESULTS:
        got = _got(results, row)
        told = "-" if got is None else f"{got:#.3g} times {row.over}"
        lines.append(f"| {row.what} | {told} | [{row.record}](benchmarks/results/{row.record}.json) |")
    return "\n".join(lines)


def _got(results: Path, row: Result) -> float | None:
    path = results / f"{row.record}.json"
    cases = read(path)["cases"] if path.is_file() else {}
    found = (
        t["got"]
        for t in cases.get(row.case, {}).get("targets", [])
        if (t["of"], t["quantity"]) == (row.of, row.quantity)
    )
    return next(found, None)


def headline(results: Path) -> str:
    """Markdown: a token's time in a whole model with and without a method, and what it costs in answers."""
    cases = _steps(results)
    if SPEEDS[1] not in cases:
        return "No measurements yet."
    case = cases[SPEEDS[1]]
    rows = {row.method: row for row in METHODS}
    parts = []
    for name in (DENSE, *HEADLINE):
        got, time, read = score(results, rows[name]), _time(case, name), _timed_reads(case, name)
        if got is None or time is None or read is None:
            return "No measurements yet."
        reads = "" if name == DENSE else f"reading {read:.0%} of the bytes; "
        at = "" if name == DENSE else f" at {got.reads:.0%}"
        parts.append(f"{time / 1e3:.1f} ms with `{name}` ({reads}RULER{at}: {got.mean:.0%}{got.note})")
    return (
        f"**At 128K tokens, batch 4, a decode step of an 8B model takes {parts[0]}, {' and '.join(parts[1:])}.** Times "
        f"are of Llama-3.1-8B's shape with random weights on one {case['device']['name']}. RULER is the mean score of "
        f"longreach-mini, the shipped 16.6 M-parameter model, at {LENGTH:,} tokens."
    )


def drawn(results: Path) -> list[Point]:
    """The picture's points: methods whose score is in a record."""
    rows = ((number, row, score(results, row)) for number, row in enumerate(METHODS))
    return [
        Point(row.method, number, row.method == DENSE, got.reads, got.mean, got.low, got.high)
        for number, row, got in rows
        if got is not None
    ]


def picture(results: Path) -> bytes | None:
    """PNG: quality against bytes read, a point a method. None without records.

    Raises Unsupported without matplotlib.
    """
    found = drawn(results)
    if not found:
        return None
    panel = PointPanel(f"longreach-mini, RULER, {LENGTH:,} tokens", tuple(found))
    return points([panel], "bytes read by decode steps, over dense attention's", "mean score")


def _steps(results: Path) -> dict[str, Any]:
    path = results / f"{STEPS}.json"
    return dict(read_cases(path)["cases"]) if path.is_file() else {}


def _entries(case: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for entry in case["entries"]:
        yield entry["name"], float(entry["microseconds"]["median"])


def _time(case: dict[str, Any], method: str) -> float | None:
    return dict(_entries(case)).get(method)


def _timed_reads(case: dict[str, Any] | None, method: str) -> float | None:
    """Bytes that the timed step read, over dense attention's; None where it was not timed."""
    found = {e["name"]: e["settings"] for e in case["entries"]} if case else {}
    read = 1.0 if method == DENSE else found.get(method, {}).get("keys_and_values_read")
    return read if method in found else None


def _over(case: dict[str, Any] | None, method: str) -> str:
    times = dict(_entries(case)) if case else {}
    if method not in times:
        return "-"
    return f"{times[method] / times[DENSE]:.2f}{' (forced)' if method in FORCED else ''}"
