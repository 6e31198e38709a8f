"""Tables of task scores of docs/quality.md, from records of evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longreach.records.labels import BEHIND, default_note, short_label
from longreach.records.record import files, read
from longreach.records.report.rows import by_prompt, paired

LOST = 0.1  # with all scores below it, a task does not distinguish methods
WORST = 3  # tasks named in a summary
SWEEP = 16  # more methods are a sweep of options, too wide for a page unless they fuse: see `longreach report`


def quality(results: Path) -> str:
    """Markdown: for each record of kind "eval" in a folder, scores with 95% intervals by task and method.

    In records of fused prompts a row is a method, else a task. Records with dense attention only and sweeps of options
    are left out.
    """
    tables = ((_fused_table if _fused(record) else _table)(path, record) for path, record in _compared(results))
    return "\n\n".join(tables) or "No evaluations yet."


def summary(results: Path) -> str:
    """Markdown: for each of these records, mean score, bytes read and largest losses of each method.

    Those of fused prompts are left out: docs/fusion/results.md has them. So are options of one method: its page has
    them.
    """
    some = ((path, record) for path, record in _compared(results) if not _fused(record) and _several(record))
    return "\n\n".join(_summary(path, record) for path, record in some) or "No evaluations yet."


def _compared(results: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in files(results):
        record = read(path)
        if record.get("kind") == "eval" and (1 < len(record["methods"]) <= SWEEP or _fused(record)):
            yield path, record


def _fused(record: dict[str, Any]) -> bool:
    return any("fuse" in method for method in record["methods"].values())


def _several(record: dict[str, Any]) -> bool:
    """Whether methods are compared with each other, and not only with dense attention."""
    return len({label.split()[0] for label in record["methods"]}) > 2


def _summary(path: Path, record: dict[str, Any]) -> str:
    labels, tasks = list(record["methods"]), record["tasks"]
    head = ["method", f"mean of {len(tasks)} tasks", "bytes read, prefill", "bytes read, decode", "loses most on"]
    rows = [head, ["---"] * len(head)]
    for label, mean in zip(labels, _means(tasks, labels), strict=True):
        reads = [_bytes(tasks, label, f"{phase}_reads") for phase in ("prefill", "decode")]
        rows.append([_named(record, label), mean, *reads, _losses(tasks, label, labels[0])])
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", f"{_where(path, record)}."])


def _losses(tasks: dict[str, Any], label: str, control: str) -> str:
    """Tasks with a score below the control's on the same prompts, by `paired`."""
    lost = []
    for name, task in tasks.items():
        ours, theirs = task["results"][label], task["results"][control]
        mine, dense = by_prompt(ours), by_prompt(theirs)
        if paired([(mine[number], dense[number]) for number in mine.keys() & dense.keys()]) == "worse":
            lost.append((ours["score"] - theirs["score"], f"{name} {ours['score']:.0%} of {theirs['score']:.0%}"))
    named = [text for _, text in sorted(lost)[:WORST]]
    return ", ".join([*named, *([f"{len(lost) - WORST} more"] if len(lost) > WORST else [])]) or "-"


def _where(path: Path, record: dict[str, Any]) -> str:
    config, samples = record["config"], max(len(task["samples"]) for task in record["tasks"].values())
    lengths = ", ".join(map(str, config.get("lengths", [config["length"]])))
    question = " question read by the method," if config.get("question") == "decode" else ""
    return (
        f"{record['model']['name']} ({record['model']['dtype']}), {lengths} tokens, {samples} prompts a task, "
        f"{config['batch']} at a time,{question} {record['device']['name']}, commit "
        f"{(record['commit'] or 'unknown')[:12]}: `{path.name}`"
    )


def _table(path: Path, record: dict[str, Any]) -> str:
    labels, tasks = list(record["methods"]), record["tasks"]
    rows = [["task", *(_named(record, label) for label in labels)], ["---"] * (1 + len(labels))]
    lost = [n for n, t in tasks.items() if max(t["results"][label]["score"] for label in labels) < LOST]
    shown = {name: task for name, task in tasks.items() if name not in lost}
    for name, task in shown.items():
        rows.append([f"`{name}`", *(_score(task["results"][label]) for label in labels)])
    if len(shown) > 1:
        rows.append([f"mean of these {len(shown)}" if lost else "mean", *_means(shown, labels)])
    if lost:
        rows.append([f"mean of all {len(tasks)}", *_means(tasks, labels)])
    for phase in ("prefill", "decode"):
        rows.append([f"bytes read, {phase}", *(_bytes(tasks, label, f"{phase}_reads") for label in labels)])
    hidden = f" Beyond the model (below {LOST:.0%} with every method), so without rows: {', '.join(lost)}; the bytes "
    beyond = f"{hidden}are those of all {len(tasks)} tasks." if lost else ""
    source = f"{_where(path, record)}.{beyond}"
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", source])


def _fused_table(path: Path, record: dict[str, Any]) -> str:
    labels, tasks, several = list(record["methods"]), record["tasks"], len(record["tasks"]) > 1
    head = ["method", *(f"`{name}`" for name in tasks), *(["mean"] if several else [])]
    rows = [head, ["---"] * len(head)]
    for label, mean in zip(labels, _means(tasks, labels), strict=True):
        mine = [task["results"][label] for task in tasks.values()]
        kept = (f", {k['kept']} of {k['right']}" if (k := one["kept"]) and k["right"] else "" for one in mine)
        scores = (f"{_score(one)}{told}" for one, told in zip(mine, kept, strict=True))
        rows.append([_named(record, label, short_label(label)), *scores, *([mean] if several else [])])
    source = (
        f"{_where(path, record)}. Chunks computed {BEHIND[record['config']['chunks']]}. After the interval: how many "
        f"of the prompts that `dense` answers wholly right stay so."
    )
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", source])


def _named(record: dict[str, Any], label: str, short: str | None = None) -> str:
    """A method in a table's head or first column."""
    note = default_note(record, label)
    return f"`{short or label}`{f' ({note})' if note else ''}"


def _score(result: dict[str, Any]) -> str:
    low, high = result["interval_95"]
    return f"{result['score']:.0%} ({low:.0%} to {high:.0%})"


def _means(tasks: dict[str, Any], labels: list[str]) -> list[str]:
    return [f"{sum(t['results'][label]['score'] for t in tasks.values()) / len(tasks):.0%}" for label in labels]


def _bytes(tasks: dict[str, Any], label: str, phase: str) -> str:
    shares = [reads["total"] for task in tasks.values() if (reads := task["results"][label][phase])]
    return f"{sum(shares) / len(shares):.0%}" if shares else "-"
