"""Evaluations with fusion or eviction: answers kept, tokens recomputed, and scores by task and by recomputed share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longreach.records.report.blocks import Block, Figure, Text, table
from longreach.records.report.families import families
from longreach.records.report.format import mean
from longreach.records.report.plots import CurvePanel, MapPanel, Scale, Series, curves, maps
from longreach.records.report.rows import Group, Row, summary
from longreach.records.report.scores import numbered

SCORE = Scale("score", 0.0, 1.0, share=True)
COUNTS = ("tokens", "recomputed", "reused", "exact")


def fused(group: Group, file: str) -> list[Block]:
    """A table of each length and pictures; nothing for a group without such methods."""
    methods = group.records[0]["methods"]
    if not any("fuse" in method or "evict" in method for method in methods.values()):
        return []
    blocks: list[Block] = [_table(group, length) for length in group.lengths]
    blocks.append(Text(
        "kept: of the prompts that dense attention answers wholly right, those that the method does too. Tokens are "
        "means over prompts and tasks: recomputed and reused ones are stored tokens, exact ones are stored tokens "
        "behind the same tokens as in the prompt; all others are computed as usual. Bytes read for a fused prompt are "
        "compared with dense attention for the rows that ran, not for the whole prompt."
    ))  # fmt: skip
    tasks = [_tasks(group, length) for length in group.lengths if len(group.at(length)) > 1]
    if tasks:
        blocks.append(Figure(f"{file}-tasks.png", maps(tasks, "task", "", SCORE), "Score by task, a row a method."))
    panels = [panel for length in group.lengths if (panel := _by_ratio(group, length))]
    if panels:
        blocks.append(Figure(f"{file}-ratio.png", curves(panels), (
            "Mean score by the share of the prompt that is recomputed, a curve a method, a point a ratio."
        )))  # fmt: skip
    return blocks


def _table(group: Group, length: int) -> Block:
    at = group.at(length)
    rows = []
    for name, label in zip(numbered(group.labels), group.labels, strict=True):
        kept = [row.result(label).get("kept") for row in at]
        counts = (_tokens(at, label, count) for count in COUNTS)
        rows.append([name, *("-" if n is None else f"{n:.0f}" for n in counts), *map(_kept, kept),
                     *([_kept(_sum(kept))] if len(at) > 1 else [])])  # fmt: skip
    names = [row.task + (f", {row.record.name}" if len(group.records) > 1 else "") for row in at]
    head = ("method", *COUNTS, *(f"kept, {name}" for name in names), *(["kept, all"] if len(at) > 1 else []))
    return table("Fusion and eviction" + (f", {length} tokens" if len(group.lengths) > 1 else ""), head, rows)


def _kept(kept: dict[str, int] | None) -> str:
    return f"{kept['kept']} of {kept['right']}" if kept else "-"


def _sum(kept: Sequence[dict[str, int] | None]) -> dict[str, int] | None:
    there = [k for k in kept if k]
    return {name: sum(k[name] for k in there) for name in ("kept", "right")} if there else None


def _tokens(rows: Sequence[Row], label: str, count: str) -> float | None:
    """Mean tokens of a prompt over tasks; None for a method without fusion."""
    found: list[dict[str, Any] | None] = [row.result(label).get("fusion") for row in rows]
    return mean([f[count] if f else None for f in found])


def _tasks(group: Group, length: int) -> MapPanel:
    at = group.at(length)
    values = tuple(tuple(row.result(label)["score"] for row in at) for label in group.labels)
    return MapPanel(f"{length} tokens", values, tuple(numbered(group.labels)), tuple(row.task for row in at))


def _by_ratio(group: Group, length: int) -> CurvePanel | None:
    """None if no method ran at several ratios. Dense attention is a level line."""
    at, lines = group.at(length), []
    ours = [label for label in group.labels if _tokens(at, label, "tokens")]
    kinds = families(group.records[0]["methods"], ours)
    if all(len(kind.labels) < 2 for kind in kinds):
        return None
    for n, kind in enumerate(kinds):
        points = sorted((_share(at, x), summary(at, x, group.dense).score) for x in kind.labels)
        x, y = zip(*points, strict=True)
        lines.append(Series(kind.name, n + 1, False, x, y, plain=True))
    if group.dense is not None:
        most, level = max(_share(at, x) for x in ours), summary(at, group.dense, group.dense).score
        lines.append(Series("dense", 0, True, (0.0, most), (level, level), plain=True))
    return CurvePanel(f"{length} tokens", "recomputed tokens, share of the prompt", "mean score", tuple(lines),
                      share=True)  # fmt: skip


def _share(rows: Sequence[Row], label: str) -> float:
    return (_tokens(rows, label, "recomputed") or 0.0) / (_tokens(rows, label, "tokens") or 1.0)
