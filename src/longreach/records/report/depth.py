"""Scores by the depth of needles in the text: by length and depth for the sweep, by depth for tasks with one needle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from longreach.records.report.blocks import Block, Figure
from longreach.records.report.plots import MapPanel, Scale, maps
from longreach.records.report.rows import Group, Row
from longreach.records.report.scores import numbered

SWEEP = "needle_sweep"
EXACT = 21  # so many depths are shown as they are, more in tenths
SCORE = Scale("mean score", 0.0, 1.0, share=True)
FIFTHS = 5


def depths(group: Group, file: str) -> list[Block]:
    """Heat maps of tasks whose samples state the depth of their needle."""
    return [*_sweep(group, file), *_others(group, file)]


def depth_of(sample: dict[str, Any]) -> float | None:
    """Depth of a sample's needle, in [0, 1]; None for samples without exactly one needle."""
    facts = sample["facts"]
    found = facts.get("depths", [facts.get("depth")])
    one = found[0] if isinstance(found, list) and len(found) == 1 else None
    if not isinstance(one, int | float) or isinstance(one, bool):
        return None
    return float(one) if 0 <= one <= 1 else None


def _sweep(group: Group, file: str) -> list[Block]:
    rows = [row for row in group.rows if row.task == SWEEP and _scores(row, group.labels[0])]
    if not rows:
        return []
    found = sorted({depth for row in rows for depth, _ in _scores(row, group.labels[0])})
    bins, names = _bins(found)
    lengths = sorted({row.length for row in rows})
    if len(lengths) == 1:
        by_method = [_binned(rows, label, bins) for label in group.labels]
        panel = MapPanel(f"needle sweep, {lengths[0]} tokens", tuple(map(tuple, by_method)),
                         tuple(numbered(group.labels)), names)  # fmt: skip
        png = maps([panel], "depth of the needle (0%: beginning of the text)", "", SCORE)
        caption = f"Needle sweep at {lengths[0]} tokens: score by depth of the needle, a row a method."
        return [Figure(f"{file}-sweep.png", png, caption)]
    panels = []
    for name, label in zip(numbered(group.labels), group.labels, strict=True):
        columns = [_binned([r for r in rows if r.length == length], label, bins) for length in lengths]
        panels.append(MapPanel(name, tuple(zip(*columns, strict=True)), names, tuple(map(str, lengths))))
    png = maps(panels, "length (tokens)", "depth of the needle", SCORE)
    caption = "Needle sweep: score by length of the text and depth of the needle (0%: its beginning), a map a method."
    return [Figure(f"{file}-sweep.png", png, caption)]


def _others(group: Group, file: str) -> list[Block]:
    """Scores of tasks with one needle at a random depth, by fifths of the depth: all tasks together, then each."""
    bins = [(n / FIFTHS, (n + 1) / FIFTHS) for n in range(FIFTHS)]
    columns = tuple(f"{low * 100:.0f}-{high * 100:.0f}%" for low, high in bins)
    blocks: list[Block] = []
    for length in group.lengths:
        rows = [row for row in group.at(length) if row.task.startswith("niah") and _scores(row, group.labels[0])]
        if not rows:
            continue
        parts = [(f"all {len(rows)} tasks", rows)] if len(rows) > 1 else []
        parts += [(row.task, [row]) for row in rows]
        panels = [
            MapPanel(f"{title} (n={sum(len(_scores(r, group.labels[0])) for r in chosen)})",
                     tuple(tuple(_binned(chosen, label, bins)) for label in group.labels),
                     tuple(numbered(group.labels)), columns)
            for title, chosen in parts
        ]  # fmt: skip
        png = maps(panels, "depth of the needle", "", SCORE)
        caption = (
            f"Tasks with one needle at {length} tokens: score by depth of the needle (0%: beginning of the text), a "
            f"row a method. A cell holds about a fifth of the n answers: mind how few they are."
        )
        blocks.append(Figure(f"{file}-depth-{length}.png", png, caption))
    return blocks


def _scores(row: Row, label: str) -> list[tuple[float, float]]:
    """(depth, score) of each answer whose sample has one needle."""
    deep = {s["number"]: depth_of(s) for s in row.entry["samples"]}
    found = [(deep[a["number"]], a["score"]) for a in row.result(label)["answers"]]
    return [(depth, score) for depth, score in found if depth is not None]


def _bins(found: Sequence[float]) -> tuple[list[tuple[float, float]], tuple[str, ...]]:
    """[low, high) of each row of a map and its name; the last one is closed."""
    if len(found) <= EXACT:
        return [(d, d) for d in found], tuple(f"{d * 100:.0f}%" for d in found)
    bins = [(n / 10, (n + 1) / 10) for n in range(10)]
    return bins, tuple(f"{low * 100:.0f}-{high * 100:.0f}%" for low, high in bins)


def _binned(rows: Sequence[Row], label: str, bins: Sequence[tuple[float, float]]) -> list[float | None]:
    sums: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        for depth, score in _scores(row, label):
            inside = (n for n, (low, high) in enumerate(bins) if low == depth or low <= depth < high)
            sums[next(inside, len(bins) - 1)].append(score)
    return [sum(s) / len(s) if (s := sums[n]) else None for n in range(len(bins))]
