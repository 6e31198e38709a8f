"""What fusion changes in a model: which tokens methods recompute, and errors of attention, keys and values by layer."""

from __future__ import annotations

from typing import Any

from longreach.records.labels import BEHIND
from longreach.records.report.blocks import Block, Text, table
from longreach.records.report.format import mean, number, percent
from longreach.records.report.fusion_figures import figures, share_recomputed
from longreach.records.report.fusion_shape import LAYERS
from longreach.records.report.reading import Record
from longreach.records.report.scores import numbered

TITLES = {"attention": "the question's attention", "key": "keys", "value": "values"}


def fusion(record: Record, file: str) -> list[Block]:
    """A description of the measurement, tables of choices and errors, and pictures."""
    results = record["results"]
    names = dict(zip(record.labels, numbered(record.labels), strict=True))
    rows = [[name, *_choice(record, results[label])] for label, name in names.items()]
    head = ("method", "recomputed tokens", "of the prompt", f"of the top {record['config']['top']}", "of attention",
            "of the most changed", *(f"error of {TITLES[name]}" for name in LAYERS))  # fmt: skip
    blocks: list[Block] = [Text(_about(record)), table("Choices and errors", head, rows), Text(_explained(record))]
    blocks.append(_by_task(record, names))
    for what in LAYERS:
        layers = range(len(next(iter(results.values()))["layers"][what]))
        lines = [[name, *(number(v, 3) for v in results[x]["layers"][what])] for x, name in names.items()]
        blocks.append(table(f"Error of {TITLES[what]} by layer", ("method", *map(str, layers)), lines, folded=True))
    return [*blocks, *figures(record, file)]


def _choice(record: Record, mine: dict[str, Any]) -> list[str]:
    hits = (mine[name] for name in ("hits_attention", "attention_chosen", "hits_change"))
    return [f"{mine['chosen']:.0f}", percent(share_recomputed(record, mine)), *map(percent, hits),
            *(number(mean(mine["layers"][name]), 3) for name in LAYERS)]  # fmt: skip


def _by_task(record: Record, names: dict[str, str]) -> Block:
    tasks, top = list(record["tasks"]), record["config"]["top"]
    shown = {"hits_attention": f"of the top {top}", "hits_change": "of the most changed"}
    head = ["method", *(f"{task}: {what}" for task in tasks for what in shown.values())]
    rows = [[name, *(percent(record["results"][x]["tasks"][task][hits]) for task in tasks for hits in shown)]
            for x, name in names.items()]  # fmt: skip
    return table("Choices by task", head, rows, folded=True)


def _about(record: Record) -> str:
    samples, config = record["samples"], record["config"]
    tasks = list(dict.fromkeys(s["task"] for s in samples))
    tokens, asking = (round(sum(s[name] for s in samples) / len(samples)) for name in ("tokens", "question_tokens"))
    behind = BEHIND.get(config["chunks"], config["chunks"])
    return (
        f"{len(samples)} prompts of {', '.join(tasks)}, {tokens} tokens on average, of which {asking} are the "
        f"question. Chunks of at most {config['chunk_tokens']} tokens, computed {behind}. Each method read the same "
        f"prompts, compared with a plain prefill; numbers are means over prompts."
    )


def _explained(record: Record) -> str:
    layers = record["config"]["layers"]
    return (
        f"Hit rates: of the tokens that matter, the share that a method recomputes. top {record['config']['top']}: the "
        f"stored tokens to which the question attends most in a plain prefill, in {_range(layers['attention'])}. "
        f"attention: the share of that attention that is on recomputed tokens. most changed: the tokens whose stored "
        f"keys and values a plain prefill changes most in {_range(layers['change'])}, as many as the method "
        f"recomputes. error: norm of the difference from a plain prefill over the plain norm, mean over layers; of the "
        f"question's attention weights, and of the keys and values of all stored tokens, recomputed or not. Tokens of "
        f"exact chunks do not count."
    )


def _range(layers: list[int]) -> str:
    return f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
