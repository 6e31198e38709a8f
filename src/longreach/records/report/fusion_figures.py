"""Pictures of a record of fusion: hit rates by recomputed share, by task, and errors by layer (A3, Figures 2 and 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from longreach.records.report.blocks import Block, Figure
from longreach.records.report.families import Family, families, ratio_of
from longreach.records.report.format import mean
from longreach.records.report.plots import CurvePanel, MapPanel, Scale, Series, curves, maps
from longreach.records.report.reading import Record
from longreach.records.report.scores import numbered

HITS = Scale("hit rate", 0.0, 1.0, share=True)
FAR = "full_reuse"  # its keys keep the positions of other prompts
RECOMPUTED = "recomputed tokens, share of the prompt"


def share_recomputed(record: Record, mine: dict[str, Any]) -> float:
    """Recomputed tokens over all tokens of the prompts, of one result."""
    tokens = mean([float(sample["tokens"]) for sample in record["samples"]])
    return float(mine["chosen"] / (tokens or 1.0))


def figures(record: Record, file: str) -> Iterator[Block]:
    """All of them, under names that begin with `file`."""
    top, kinds = record["config"]["top"], families(record["methods"], record.labels)
    titles = {"hits_attention": f"the {top} tokens attended to most", "attention_chosen": "the question's attention",
              "hits_change": "the tokens that change most"}  # fmt: skip
    panels = [_by_ratio(record, kinds, title, "recomputed", lambda mine, name=name: mine[name], share=True)  # type: ignore[misc]
              for name, title in titles.items()]  # fmt: skip
    panels.append(_by_ratio(record, kinds, "error of the question's attention", "mean over layers",
                            lambda mine: mean(mine["layers"]["attention"])))  # fmt: skip
    yield Figure(f"{file}-hits.png", curves(panels), (
        "Hit rates: of the tokens that matter to the question, the share that each method recomputes; and the error of "
        "the question's attention that remains."
    ))  # fmt: skip
    tasks = list(record["tasks"])
    if len(tasks) > 1:
        shown = [_by_task(record, tasks, titles[name], name) for name in ("hits_attention", "hits_change")]
        yield Figure(f"{file}-tasks.png", maps(shown, "task", "", HITS), "Hit rates by task, a row a method.")
    apart = f" {FAR} reuses the values of pie, but keys at other positions: one panel leaves it out."
    far = apart if any(method["fuse"]["name"] == FAR for method in record["methods"].values()) else ""
    ratios = sorted({ratio for method in record["methods"].values() if (ratio := ratio_of(method)) is not None})
    for ratio in ratios or (None,):
        ours = [(n, family.name, x) for n, family in enumerate(kinds) for x in family.labels
                if ratio_of(record["methods"][x]) in (None, ratio)]  # fmt: skip
        at = f"ratio {ratio:g}" if ratio is not None else ""
        where = f"-{ratio:g}" if len(ratios) > 1 else ""
        yield Figure(f"{file}-layers{where}.png", curves(_by_layer(record, ours, at)), (
            f"Errors by layer{', ' * bool(at)}{at}: of the question's attention, and of keys and values of all stored "
            f"tokens, recomputed or not. Norm of the difference from a plain prefill, over the plain norm.{far}"
        ))  # fmt: skip


def _by_ratio(
    record: Record, kinds: Sequence[Family], title: str, ylabel: str, of: Callable[[dict[str, Any]], float | None],
    share: bool = False,
) -> CurvePanel:  # fmt: skip
    lines = []
    for n, family in enumerate(kinds):
        found = [(share_recomputed(record, mine), of(mine)) for mine in map(record["results"].get, family.labels)]
        known = sorted((x, y) for x, y in found if y is not None)
        if known:
            x, y = zip(*known, strict=True)
            lines.append(_line(family.name, n, x, y))
    return CurvePanel(title, RECOMPUTED, ylabel, tuple(lines), share=share)


def _by_layer(record: Record, ours: Sequence[tuple[int, str, str]], at: str) -> list[CurvePanel]:
    near = [one for one in ours if record["methods"][one[2]]["fuse"]["name"] != FAR]
    shown = [("attention", "the question's attention", ours), ("value", "values", ours), ("key", "keys", ours)]
    if 0 < len(near) < len(ours):
        shown.append(("key", f"keys, without {FAR}", near))
    panels = []
    for what, title, those in shown:
        found = [(n, name, record["results"][x]["layers"][what]) for n, name, x in those]
        lines = tuple(_line(name, n, tuple(map(float, range(len(y)))), tuple(math.nan if v is None else v for v in y))
                      for n, name, y in found)  # fmt: skip
        panels.append(CurvePanel(f"{title}{', ' * bool(at)}{at}", "layer", "relative error", lines))
    return panels


def _by_task(record: Record, tasks: Sequence[str], title: str, name: str) -> MapPanel:
    values = tuple(tuple(record["results"][x]["tasks"][task][name] for task in tasks) for x in record.labels)
    return MapPanel(title, values, tuple(numbered(record.labels)), tuple(tasks))


def _line(label: str, number: int, x: Sequence[float], y: Sequence[float]) -> Series:
    return Series(label, number + 1, False, tuple(x), tuple(y), plain=True)  # 0 is dense attention's colour
