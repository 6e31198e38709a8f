"""Language modelling: perplexity in prefill and while decoding, in all and by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from longreach.records.labels import short_label
from longreach.records.report.blocks import Block, Cell, Figure, Text, table
from longreach.records.report.format import cropped, finite, number, percent, seconds
from longreach.records.report.plots import CurvePanel, Series, curves
from longreach.records.report.reading import Record
from longreach.records.report.scores import numbered

PHASES = ("prefill", "decode")
FAILURES, ERROR = 50, 300  # windows shown, characters


def perplexity(record: Record, file: str) -> list[Block]:
    """A table of all methods and curves over positions."""
    results, dense = record["results"], record.dense
    labels = [label for label in record.labels if label in results]
    base = results.get(dense) if dense is not None else None
    rows: list[list[str | Cell]] = []
    for name, label in zip(numbered(record.labels), record.labels, strict=True):
        if label in results:
            rows.append([name, *(c for phase in PHASES for c in _cells(results[label], base, phase, label == dense)),
                         *(seconds(results[label]["seconds"][part]) for part in ("read", "per_token"))])  # fmt: skip
    head = ["method"]
    for phase in PHASES:
        head += [f"perplexity, {phase}", "nll (nats)", "over dense's", "tokens", f"bytes, {phase}"]
    head += ["time to read", "per token"]
    files = ", ".join(f"{f['name']} ({f['tokens']} tokens)" for f in record["files"])
    blocks: list[Block] = [
        table("Perplexity", head, rows),
        Text(f"Texts: {files}. nll: mean negative log-likelihood of a token, with its 95% "
             f"interval (bootstrap over windows, where there are several). over dense's: ratio of perplexities, "
             f"below 1 is better. bytes: keys, values and metadata read, over what dense attention reads."),
    ]  # fmt: skip
    blocks += _failed(record.content.get("failed", []))
    panels = [panel for phase in PHASES for panel in _panels(record, labels, phase)]
    if panels:
        caption = "Negative log-likelihood by position in the text; lower is better."
        if base is not None and len(labels) > 1:
            caption += " Beside it, how much higher it is than dense attention's at the same positions."
        blocks.append(Figure(f"{file}-nll.png", curves(panels), caption))
    return blocks


def _failed(failed: Sequence[dict[str, Any]]) -> list[Block]:
    if not failed:
        return []
    windows = len({one["window"] for one in failed})
    rows = [[str(one["window"]), one["method"], cropped(one["error"], ERROR)] for one in failed[:FAILURES]]
    return [
        Text(f"{windows} window{'s' * (windows > 1)} failed with an error, with one method or several. Such a window "
             f"is left out for all, so that their means are over the same tokens; a method that failed in every one "
             f"has no row.", loud=True),
        table("Failed windows", ("window", "method", "error"), rows, texts=3),
    ]  # fmt: skip


def _cells(result: dict[str, Any], base: dict[str, Any] | None, phase: str, dense: bool) -> list[str | Cell]:
    part, reads = result[phase], result[f"{phase}_reads"]
    if part is None:
        return ["-"] * 5
    reference = base[phase]["perplexity"] if base and base[phase] and not dense else None
    over = part["perplexity"] / reference if reference and part["perplexity"] is not None else None
    bounds = part.get("interval_95")
    spread = f"{number(bounds[0], 4)} to {number(bounds[1], 4)}" if bounds else ""
    return [number(part["perplexity"], 5), Cell(number(part["nll"], 5), spread), number(over, 4), str(part["tokens"]),
            percent(reads["total"] if reads else None)]  # fmt: skip


def _panels(record: Record, labels: Sequence[str], phase: str) -> list[CurvePanel]:
    results, dense = record["results"], record.dense
    found = {x: _curve(results[x][phase]["by_position"]) for x in labels if results[x][phase] is not None}
    found = {x: curve for x, curve in found.items() if curve}
    if not found:
        return []
    place = {label: n for n, label in enumerate(record.labels)}
    series = [Series(short_label(x), place[x], x == dense, tuple(c), tuple(c.values())) for x, c in found.items()]
    panels = [CurvePanel(phase, "position (tokens)", "nll (nats a token)", tuple(series))]
    if dense in found and len(found) > 1:
        base = found[dense]
        apart = [Series(short_label(x), place[x], False, tuple(p for p in c if p in base),
                        tuple(v - base[p] for p, v in c.items() if p in base))
                 for x, c in found.items() if x != dense]  # fmt: skip
        panels.append(CurvePanel(f"{phase}, over dense's", "position (tokens)", "nll - dense's (nats a token)",
                                 tuple(apart)))  # fmt: skip
    return panels


def _curve(by_position: Sequence[dict[str, Any]]) -> dict[float, float]:
    """nll by the middle position of each part; NaN, a gap in the curve, if it is not finite."""
    return {(p["start"] + p["stop"]) / 2: p["nll"] if finite(p["nll"]) else math.nan for p in by_position}
