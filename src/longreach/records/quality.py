"""Scores of tasks as README shows them, from the records of evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOST = 0.1  # a score that tells nothing about methods


def quality(results: Path) -> str:
    """Markdown: for each record of kind "eval" in a folder, tasks by methods, each score with its 95% interval.

    Records of dense attention alone compare nothing and are left out.
    """
    records = [(path, json.loads(path.read_text())) for path in sorted(results.glob("*.json"))]
    tables = [_table(path, r) for path, r in records if r.get("kind") == "eval" and len(r["methods"]) > 1]
    return "\n\n".join(tables) or "No evaluations yet."


def _table(path: Path, record: dict[str, Any]) -> str:
    labels, tasks = list(record["methods"]), record["tasks"]
    rows = [["task", *(f"`{label}`" for label in labels)], ["---"] * (1 + len(labels))]
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
    config, where = record["config"], record["device"]["name"]
    lengths = ", ".join(map(str, config.get("lengths", [config["length"]])))
    samples = max(len(task["samples"]) for task in tasks.values())
    hidden = f" Beyond the model (below {LOST:.0%} with every method), so without rows: {', '.join(lost)}; the bytes "
    beyond = f"{hidden}are those of all {len(tasks)} tasks." if lost else ""
    said = (
        f"{record['model']['name']} ({record['model']['dtype']}), {lengths} tokens, {samples} prompts a task, "
        f"{where}, commit {(record['commit'] or 'unknown')[:12]}: `{path.name}`.{beyond}"
    )
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", said])


def _score(result: dict[str, Any]) -> str:
    low, high = result["interval_95"]
    return f"{result['score']:.0%} ({low:.0%} to {high:.0%})"


def _means(tasks: dict[str, Any], labels: list[str]) -> list[str]:
    return [f"{sum(t['results'][label]['score'] for t in tasks.values()) / len(tasks):.0%}" for label in labels]


def _bytes(tasks: dict[str, Any], label: str, phase: str) -> str:
    shares = [reads["total"] for task in tasks.values() if (reads := task["results"][label][phase])]
    return f"{sum(shares) / len(shares):.0%}" if shares else "-"
