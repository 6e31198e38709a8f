"""Fidelity: how far next-token distributions and each head's output are from dense attention's."""

from __future__ import annotations

import math
from typing import Any

from longreach.records.labels import short_label
from longreach.records.report.blocks import Block, Cell, Figure, Text, table
from longreach.records.report.format import finite, number, percent, seconds
from longreach.records.report.plots import CurvePanel, MapPanel, Scale, Series, curves, maps
from longreach.records.report.reading import Record
from longreach.records.report.scores import numbered

LEAST = 1e-7  # nats: below it rounding decides


def fidelity(record: Record, file: str) -> list[Block]:
    """A table of all methods, KL over steps and relative output error by layer and head."""
    results = record["results"]
    labels = [(n, name, x) for n, (name, x) in enumerate(zip(numbered(record.labels), record.labels, strict=True))
              if x in results]  # fmt: skip
    rows = [_row(name, results[x]) for _, name, x in labels]
    head = ("method", "KL (nats)", "first divergence", "mean error", "largest error", "at", "bytes, prefill",
            "bytes, decode", "time to read", "per token")  # fmt: skip
    blocks: list[Block] = [table("Fidelity to dense attention", head, rows), Text(
        "KL: mean over decode steps of KL(dense || method) of next-token distributions, all methods fed dense "
        "attention's answer. first divergence: the first token, counted from 0, that the method would have chosen "
        "differently. error: |o - o_dense| / |o_dense| of a head's output on the same hidden states, over decode "
        "steps; mean over layers and heads, and the largest of all steps with its layer and head."
    )]  # fmt: skip
    series = [Series(short_label(x), n, x == record.dense, tuple(map(float, range(len(kl)))), kl,
                     results[x]["first_divergence"])
              for n, _, x in labels if x != record.dense and (kl := _kl(results[x]["kl_steps"]))]  # fmt: skip
    if series:
        panel = CurvePanel("KL(dense || method)", "token of the answer", "KL (nats)", tuple(series), log=True)
        blocks.append(Figure(f"{file}-kl.png", curves([panel]), (
            f"KL of next-token distributions over tokens of the answer; the first, 0, is the prefill's. X: the first "
            f"token that would have been another. Values below {LEAST:g} are drawn there."
        )))  # fmt: skip
    steps = {name: error for _, name, x in labels if x != record.dense and (error := results[x]["layer_error"])}
    prompt = {name: error for _, name, x in labels if (error := results[x].get("prefill_layer_error"))}
    blocks += _maps(steps, f"{file}-layer-error.png", "decode steps")
    if prompt:
        blocks.append(table(
            "Errors of the prompt, where its prefill is not dense",
            ("method", "rows", "mean error", "largest error", "at"),
            [[name, str(error["rows"]), *_errors(error)] for name, error in prompt.items()],
        ))  # fmt: skip
        blocks.append(Text("The same measure, over rows of the prompt, evenly spaced, while the prefill reads it."))
    return blocks + _maps(prompt, f"{file}-layer-error-prefill.png", "rows of the prompt")


def _maps(errors: dict[str, Any], file: str, over: str) -> list[Block]:
    """A map of layers by heads for each method."""
    if not errors:
        return []
    most = max((v for error in errors.values() for layer in error["mean"] for v in layer if finite(v)), default=0.0)
    scale = Scale("relative output error", 0.0, most or 1.0, root=True, dark_is_high=True)
    png = maps([_panel(name, error["mean"]) for name, error in errors.items()], "head", "layer", scale)
    caption = f"Relative output error by layer and head, mean over {over}; darker is further from dense."
    return [Figure(file, png, caption)]


def _row(name: str, result: dict[str, Any]) -> list[str | Cell]:
    diverges = result["first_divergence"]
    error = result["layer_error"]
    return [
        name, number(result["kl"], 3), f"none in {result['steps']}" if diverges is None else str(diverges),
        *(_errors(error) if error else ("-", "-", "-")),
        *(percent(r["total"] if (r := result[f"{phase}_reads"]) else None) for phase in ("prefill", "decode")),
        *(seconds(result["seconds"][part]) for part in ("read", "per_token")),
    ]  # fmt: skip


def _errors(error: dict[str, Any]) -> tuple[str, str, str]:
    means = [v for layer in error["mean"] for v in layer if v is not None]
    worst = [(v, layer, head) for layer, heads in enumerate(error["max"]) for head, v in enumerate(heads)
             if v is not None]  # fmt: skip
    if not means or not worst:
        return "-", "-", "-"
    # no number at all is worse than any number
    value, layer, head = max(worst, key=lambda w: (math.isnan(w[0]), w[0]))
    return number(sum(means) / len(means), 3), number(value, 3), f"layer {layer}, head {head}" if value else "-"


def _kl(steps: list[float | None]) -> tuple[float, ...]:
    return tuple(max(v, LEAST) if v is not None and finite(v) else math.nan for v in steps)


def _panel(name: str, error: list[list[float | None]]) -> MapPanel:
    heads = max(map(len, error))
    values = tuple(tuple(v if finite(v) else None for v in [*row, *[None] * (heads - len(row))]) for row in error)
    return MapPanel(name, values, tuple(map(str, range(len(error)))), tuple(map(str, range(heads))))
