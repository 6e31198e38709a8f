"""Attention of a model: sinks, recency, heavy keys, retrieval heads, likeness of queries, agreement of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from longreach.records.report.attention_figures import KINDS, figures, part, sunk
from longreach.records.report.blocks import Block, Cell, Text, table
from longreach.records.report.format import number, percent
from longreach.records.report.reading import Record

HEADS = 10  # retrieval heads in the table


def attention(record: Record, file: str) -> list[Block]:
    """A description of the measurement, a table by layer for each kind of rows, retrieval heads, and pictures."""
    results = record["results"]
    blocks: list[Block] = [Text(_about(record))]
    blocks += [_layers(results, kind) for kind in KINDS]
    blocks.append(Text(_explained(results)))
    blocks += [_retrieval_heads(results), *_unknown(results)]
    return [*blocks, *figures(results, file)]


def mean(values: Sequence[float | None] | None) -> float | None:
    """Mean over a layer's heads; None if it was not measured."""
    there = [v for v in values or () if v is not None]
    return sum(there) / len(there) if there else None


def retrieval_heads(results: dict[str, Any]) -> list[tuple[float, int, int]]:
    """(score, layer, head) by mean score over tasks, highest first."""
    tasks = [task["score"] for task in results["retrieval"].values()]
    layers, heads = len(results["windows"]), len(results["rows"]["text"]["sinks"][0])
    scores = {(n, h): mean([t[n][h] for t in tasks if t[n] is not None]) for n in range(layers) for h in range(heads)}
    found = [(score, n, h) for (n, h), score in scores.items() if score is not None]
    return sorted(found, key=lambda f: (-f[0], f[1], f[2]))


def _about(record: Record) -> str:
    samples, rows = record["samples"], record["results"]["rows"]
    tasks = list(dict.fromkeys(s["task"] for s in samples))
    right, tokens = sum(s["right"] for s in samples), sum(s["answer_tokens"] for s in samples)
    return (
        f"{len(samples)} prompts of {', '.join(tasks)}, attention exact. Rows (query positions) are of two kinds. "
        f"text: {rows['text']['count']} positions drawn from the last quarter of the texts before the question. "
        f"answer: the {rows['answer']['count']} positions whose next token is one of the right answer's, which was "
        f"fed to the model token by token; it would have chosen {right} of these {tokens} tokens itself."
    )


def _layers(results: dict[str, Any], kind: str) -> Block:
    rows, edge = results["rows"][kind], results["top_keys"]
    virtual = any(map(any, rows["virtual_sink"]))
    head = ["layer", *(["window"] if any(results["windows"]) else []), f"first {results['sink_keys']}",
            *(["virtual sink"] if virtual else []), *(f"last {n}" for n in results["last_keys"]),
            *(f"top {k}" for k in edge), f"keys for {results['cover']:.0%}", "cos to previous", "best cos",
            *(f"match {tau:g}" for tau in results["taus"])]  # fmt: skip
    lines: list[list[str | Cell]] = []
    for n, window in enumerate(results["windows"]):
        line = [str(n), *([str(window or "-")] if any(results["windows"]) else []), percent(mean(rows["sinks"][n]))]
        line += [percent(mean(rows["virtual_sink"][n]))] if virtual else []
        line += [
            percent(mean(part(rows[name], i)[n])) for name in ("windows", "tops") for i in range(_many(rows, name))
        ]
        line += [number(mean(rows["cover"][n]), 3), *(number(mean(rows[name][n]), 2) for name in ("previous", "best"))]
        line += [percent(mean(part(rows["match"], i)[n])) for i in range(len(results["taus"]))]
        lines.append(list(line))
    return table(f"By layer, {kind} rows: means over query heads", head, lines)


def _many(rows: dict[str, Any], name: str) -> int:
    return len(rows[name][0][0])


def _explained(results: dict[str, Any]) -> str:
    sink = "; what a virtual sink takes of the whole stands apart" if sunk(results) else ""
    return (
        f"Shares are of the attention that falls on keys{sink}. first, last: on the first positions of the text and "
        f"the last keys before the row, its own among them. top: on the heaviest keys of each head. keys for "
        f"{results['cover']:.0%}: how many of the heaviest hold so much. cos: similarity of queries before rotation to "
        f"the previous one, and the best to one of the last {results['recent_queries']}. match: rows for which "
        f"MAC-Attention would find a query near enough among these at this tau. In a layer with a sliding window all "
        f"is said of the keys in the window."
    )


def _retrieval_heads(results: dict[str, Any]) -> Block:
    tasks = results["retrieval"]
    head = ["layer", "head", "score", *(f"{name}: {what}" for name in tasks for what in ("score", "on the needle"))]
    lines: list[list[str | Cell]] = []
    for score, layer, one in retrieval_heads(results)[:HEADS]:
        if not score:
            break
        line: list[str | Cell] = [str(layer), str(one), percent(score)]
        for task in tasks.values():
            line += [percent(t[layer][one] if t[layer] else None) for t in (task["score"], task["needle"])]
        lines.append(line)
    return table("Retrieval heads: how often the heaviest key is the needle's token that comes next", head, lines)


def _unknown(results: dict[str, Any]) -> Iterator[Block]:
    whys = results["queries_unknown"]
    if whys:
        first = next(iter(whys))
        yield Text(f"Queries before rotation are not known in layers {', '.join(map(str, whys))}: {whys[first]}.")
