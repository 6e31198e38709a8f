"""From answers to scores: an evaluation record's entries for each task and method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from longreach.evals.evaluate import Evaluation
from longreach.evals.methods import DENSE
from longreach.evals.read_shares import ReadShares
from longreach.evals.sampling import mean_bars, mean_of
from longreach.records import wilson
from longreach.tasks.base import Grouped

PHASES = ("prefill", "decode")


def tasks_entry(evaluation: Evaluation, parts: dict[str, Any]) -> dict[str, Any]:
    """{name: task, length, source, samples, results of each method} from the parts that `Evaluation.run` made."""
    labels = [spec.label for spec in evaluation.specs]
    found: dict[str, Any] = {}
    for name, one in evaluation.tasks.items():
        task = one.task
        asked = [a.to_json() for a in evaluation.asked[name]]
        entries = [entry for key, part in parts.items() if key.split("|")[1] == name for entry in part]
        by_label = {label: [e for e in entries if e["label"] == label] for label in labels}
        dense = {(a["number"], a["draw"]): a for e in by_label[DENSE] for a in e["answers"]}
        results = {label: result(by_label[label], None if label == DENSE else dense) for label in labels}
        if isinstance(task, Grouped) and task.by:
            for mine in results.values():
                mine["by"] = {fact: by_fact(fact, asked, mine["answers"]) for fact in task.by}
        found[name] = {
            "task": task.name,
            "length": one.length,
            "source": task.source,
            "max_new_tokens": task.max_new_tokens,
            "characters_per_token": sum(a["characters"] for a in asked) / sum(a["tokens"] for a in asked),
            "samples": asked,
            "results": results,
        }
    return found


def result(entries: Sequence[dict[str, Any]], dense: dict[tuple[int, int], dict[str, Any]] | None) -> dict[str, Any]:
    """One method on one task. dense: its answers by (number, draw), None where this is dense itself.

    kept: answers that are wholly right with dense attention ("right"), and how many of them still are. alone: answers
    to prompts that ran one by one, since their batch failed (for example, out of memory). ran: the implementations of
    attend that computed them.
    """
    raw = sorted((a for e in entries for a in e["answers"]), key=lambda a: (a["number"], a["draw"]))
    answers = []
    for a in raw:
        other = None if dense is None else dense[a["number"], a["draw"]]
        ids = a["ids"]
        apart = None if other is None or a["error"] or other["error"] else diverges_at(ids, other["ids"])
        answers.append({**{k: v for k, v in a.items() if k != "ids"}, "diverges_at": apart})
    score, interval, _ = scored(answers)
    length, kept = None, None
    if dense is not None:  # an answer that failed has no length
        pairs = [(a, dense[a["number"], a["draw"]]) for a in answers]
        whole = [(a["tokens"], other["tokens"]) for a, other in pairs if not (a["error"] or other["error"])]
        theirs = sum(tokens for _, tokens in whole)
        length = sum(tokens for tokens, _ in whole) / theirs if theirs else None
        right = [a for a, other in pairs if other["score"] == 1]
        kept = {"right": len(right), "kept": sum(a["score"] == 1 for a in right)}
    times = [e["seconds"] for e in entries if e["seconds"]]
    steps = sum(t["steps"] for t in times)
    return {
        "score": score,
        "interval_95": interval,
        "failed": sum(a["error"] is not None for a in answers),
        "alone": sum(len(e["answers"]) for e in entries if e.get("alone")),
        "answers": answers,
        "length_over_dense": length,
        "kept": kept,
        "prefill_reads": _reads([e["prefill_bytes"] for e in entries]),
        "decode_reads": _reads([e["decode_bytes"] for e in entries]),
        **_mean_if_any("sampling", entries, mean_of),
        **_mean_if_any("error_bars", entries, mean_bars),
        **_plans(entries),
        **_fusion([e["fusion"] for e in entries if "fusion" in e]),
        "ran": {phase: sorted({how for e in entries for how in e.get(f"{phase}_ran", ())}) for phase in PHASES},
        "not_captured": next((why for e in entries if (why := e.get("not_captured"))), None),
        "seconds": {
            "read": _mean([t["read"] for t in times]) if times else None,
            "setup": sum(t["setup"] for t in times),
            "per_token": sum(t["decode"] for t in times) / steps if steps else None,
        },
    }


def _mean_if_any(
    name: str, entries: Sequence[dict[str, Any]], mean: Callable[[list[dict[str, Any]]], dict[str, Any] | None]
) -> dict[str, Any]:
    """{name: mean of the entries' values}, or nothing if there is none. A part of an older run lacks the name."""
    found = mean([e[name] for e in entries if e.get(name)])
    return {} if found is None else {name: found}


def _plans(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"plans": each plan that a session found or made itself}, or nothing."""
    found = {plan["text"]: plan for e in entries for plan in e.get("plans", ())}
    return {"plans": list(found.values())} if found else {}


def scored(answers: Sequence[dict[str, Any]]) -> tuple[float, list[float], int]:
    """(mean score, its 95% interval, prompts) of answers.

    Draws of one prompt are not independent: their mean is the prompt's score (mean pass@1), and prompts are counted.
    """
    draws: dict[int, list[float]] = {}
    for a in answers:
        draws.setdefault(a["number"], []).append(a["score"])
    score = _mean([_mean(scores) for scores in draws.values()])
    return score, list(wilson(score * len(draws), len(draws))), len(draws)


def by_fact(fact: str, asked: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{value of a fact: score, interval_95 and number of the samples with it}."""
    numbers: dict[str, set[int]] = {}
    for a in asked:
        numbers.setdefault(str(a["facts"][fact]), set()).add(a["number"])
    found = {}
    for value, mine in numbers.items():
        score, interval, samples = scored([a for a in answers if a["number"] in mine])
        found[value] = {"score": score, "interval_95": interval, "samples": samples}
    return found


def diverges_at(ids: Sequence[int], other: Sequence[int]) -> int | None:
    """The first token, from 0, that differs; None where answers are the same."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, other)))
    return None if same == len(ids) == len(other) else same


def _fusion(became: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a fused task: mean tokens of a prompt by what became of them, and mean errors of stored keys and values at
    the recomputed ones, by layer."""
    if not became:
        return {}
    counts = {
        name: _mean([b[name] for b in became]) for name in ("tokens", "exact", "recomputed", "reused", "computed")
    }
    errors = {}
    for name in ("key_error", "value_error"):
        layers = [[e for e in layer if e is not None] for layer in zip(*(b[name] for b in became), strict=True)]
        errors[name] = [_mean(layer) if layer else None for layer in layers]
    return {"fusion": {**counts, **errors}}


def _reads(read: Sequence[list[int] | None]) -> dict[str, float] | None:
    there = [r for r in read if r]
    total = ReadShares.over([sum(column) for column in zip(*there, strict=True)])
    return None if total is None else asdict(total)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
