"""The model card's part on scores: tables by task and length, and the text below them."""

from __future__ import annotations

from collections.abc import Iterator

from longreach.records.report.format import interval, one_line, percent
from longreach.records.report.reading import Record
from longreach.records.report.rows import Row, summary
from longreach.tasks.registry import RULER
from longreach.train.mini.card.format import commit, table
from longreach.train.mini.card.inputs import DENSE, Inputs

WEAK = 0.6  # a score below which a task counts as one the model cannot be relied on for


def evaluation(inputs: Inputs) -> Iterator[str]:
    yield "## Evaluation"
    yield (
        "`longreach eval` with dense attention: the share of expected texts found in an answer, with its 95% interval "
        "(Wilson). Every prompt's facts and every answer are in the records."
    )
    measured = dict.fromkeys(row.task for row in inputs.rows)
    ruler = [task for task in RULER if task in measured]
    others = [task for task in measured if task not in RULER]
    if ruler:
        yield f"RULER (Hsieh et al., 2024), {len(ruler)} of the {len(RULER)} tasks that take no data set:"
        averages = [_average(inputs, length) for length in inputs.lengths]
        yield table(["task", *(f"{n} tokens" for n in inputs.lengths)],
                     [*(_scores(inputs, task) for task in ruler), ["**average**", *averages]])  # fmt: skip
    if others:
        yield "Other tasks:"
        yield table(["task", *(f"{n} tokens" for n in inputs.lengths)], [_scores(inputs, task) for task in others])
    yield "\n".join(_measured(record) for record in inputs.records)


def _scores(inputs: Inputs, task: str) -> list[str]:
    return [f"`{one_line(task)}`", *(_score(inputs.at(task, length)) for length in inputs.lengths)]


def _score(row: Row | None) -> str:
    if row is None:
        return "not measured"
    result = row.result(DENSE)
    failed = f"; {result['failed']} failed" if result["failed"] else ""
    return f"{percent(result['score'])} ({interval(result['interval_95'])}{failed})"


def _average(inputs: Inputs, length: int) -> str:
    """Of RULER's tasks, or nothing but how many there are where some are missing: their mean would mislead."""
    rows = [row for task in RULER if (row := inputs.at(task, length))]
    if len(rows) < len(RULER):
        return f"{len(rows)} of {len(RULER)} measured"
    found = summary(rows, DENSE, DENSE)
    return f"**{percent(found.score)}** ({interval(found.interval)})"


def _measured(record: Record) -> str:
    config, model = record["config"], record["model"]
    counts = sorted({len(task["samples"]) for task in record["tasks"].values()})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    drawn = f"answers drawn at temperature {config['temperature']:g}" if config.get("temperature") else "greedy answers"
    lengths = ", ".join(map(str, record.lengths))
    return (
        f"* {lengths} tokens of prompt and answer: {samples} prompts a task, seed {config.get('seed')}, "
        f"{drawn}, {model['dtype']} on {one_line(record['device']['name'])}, torch {record['versions'].get('torch')}, "
        f"commit {commit(record.content)} (`{one_line(record.name)}`)"
    )


def limits(inputs: Inputs) -> Iterator[str]:
    yield "## Limits"
    told_of = []
    for length in inputs.lengths:
        scores = {row.task: row.result(DENSE)["score"] for row in inputs.rows if row.length == length}
        weak = [f"`{one_line(task)}` ({percent(score)})" for task, score in scores.items() if score < WEAK]
        if weak:
            told_of.append(f"Below {WEAK:.0%} at {length} tokens: {', '.join(weak)}.")
    if not told_of:
        told_of.append(f"No task was measured below {WEAK:.0%}.")
    missing = [task for task in RULER if not any(row.task == task for row in inputs.rows)]
    if missing:
        told_of.append(f"Not measured: {', '.join(f'`{task}`' for task in missing)}.")
    trained, positions = max(run.longest for run in inputs.runs), inputs.config["max_position_embeddings"]
    longest = max(inputs.lengths)
    if trained < positions:
        told_of.append(f"Positions go to {positions}, but no sequence longer than {trained} tokens was trained.")
    if longest < positions:
        told_of.append(f"Nothing longer than {longest} tokens was measured.")
    told_of.append(
        "The tasks are of the kinds it was trained on: scores compare methods on this model, and say nothing of other "
        "tasks or of what a larger model would lose."
    )
    yield "\n".join(f"* {limit}" for limit in told_of)
