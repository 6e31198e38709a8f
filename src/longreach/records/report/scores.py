"""Scores by task and method, bytes read and time of each method, and quality against bytes read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from longreach.records.labels import short_label
from longreach.records.report.blocks import Block, Cell, Figure, Table, Text, table
from longreach.records.report.format import cropped, interval, percent, seconds, times
from longreach.records.report.plots import CurvePanel, Point, PointPanel, Series, curves, points
from longreach.records.report.rows import LOST, Group, Row, Summary, summary

NO_DENSE = "No method of these records is dense in prefill and decode, so nothing is compared with dense attention."
FURTHEST = 512  # tokens of answers drawn
LABEL = 80  # characters of a method's name
WIDE = 18  # columns of a table


def numbered(labels: Sequence[str]) -> list[str]:
    """Methods as tables and pictures name them."""
    return [f"{n} {cropped(short_label(label), LABEL)}" for n, label in enumerate(labels, 1)]


def scores(group: Group, file: str) -> list[Block]:
    """All tables and pictures of a group but those over depth. file: how its pictures' names begin."""
    blocks: list[Block] = [_scores(group), *_lost(group), Text(
        "Each score with its 95% interval (Wilson). ▼ below and ▲ above dense on the same prompts: by a paired test, "
        "the sign test of the prompts on which they differ (McNemar's for scores of 0 and 1), exact, two-sided at 5%. "
        "No mark does not say that two methods are equal: more samples may tell them apart; of twenty that are equal "
        "one may be marked by chance. mean: over the tasks of a length; its interval is Wilson's over all their "
        "samples. ch/token: characters per token of the prompts."
    )]  # fmt: skip
    if group.dense is None:
        blocks.append(Text(NO_DENSE, loud=True))
    blocks += _alone(group)
    sums = {length: [summary(group.at(length), x, group.dense) for x in group.labels] for length in group.lengths}
    for length, found in sums.items():
        title = "What methods read and take" + (f", {length} tokens" if len(sums) > 1 else "")
        blocks.append(_costs(title, found))
    blocks.append(Text(
        "Bytes are keys, values and metadata read, over what dense attention reads (keys are half of that). A method "
        "above 100% saves nothing: an oracle, which looks at all keys to choose, shows what a choice could reach. time "
        "to read: the prompts of a batch; per token: a decode step. Both, like bytes and length of the answers over "
        "dense's, are means over tasks. same: answers equal to dense's, token by token."
    ))  # fmt: skip
    blocks += [
        Text(text) for text in dict.fromkeys(r.content.get("bytes_compared_with") for r in group.records) if text
    ]
    blocks += _quality(group, sums, file)
    blocks += _same_for(group, file)
    several = len(group.rows) > 1
    if several and group.dense is not None:
        blocks.append(
            _by_task(group, "Length of answers over dense's, by task", lambda r: times(r["length_over_dense"]))
        )
    if several:
        for phase in ("prefill", "decode"):
            if any(row.result(x)[f"{phase}_reads"] for row in group.rows for x in group.labels):
                blocks.append(_by_task(group, f"Bytes read in {phase} over dense's, by task", _share(f"{phase}_reads")))
        blocks.append(_by_task(group, "Time per token, by task", lambda r: seconds(r["seconds"]["per_token"])))
    return blocks


def _alone(group: Group) -> list[Block]:
    results = [(r, [x for task in r["tasks"].values() for x in task["results"].values()]) for r in group.records]
    found = [(record, sum(x.get("alone", 0) for x in theirs)) for record, theirs in results]
    return [
        Text(f"{alone} answers were asked prompt by prompt, as their batch of {record['config'].get('batch')} failed "
             f"({record.name}): with the batch rounding changes, and with it an answer now and then.", loud=True)
        for record, alone in found if alone
    ]  # fmt: skip


def _scores(group: Group) -> Table:
    rows: list[list[str | Cell]] = []
    for length in group.lengths:
        at = group.at(length)
        for row in at:
            cells = [_score(row.result(x), row.mark(x, group.dense)) for x in group.labels]
            rows.append([*_about(group, row), f"{len(row.entry['samples'])}", *cells])
        if len(at) > 1:
            where = f", {length} tokens" if len(group.lengths) > 1 else ""
            rows.append(_means(group, at, f"mean of all {len(at)}{where}"))
            within = [row for row in at if row.task not in group.lost(length)]
            if 1 < len(within) < len(at):
                rows.append(_means(group, within, f"mean of the {len(within)} within reach{where}"))
    return _readable(table("Scores", [*_head(group), *numbered(group.labels)], rows))


def _readable(wide: Table) -> Table:
    """The table, with a row for each column if it has too many of them for a page."""
    if len(wide.head) <= WIDE:
        return wide
    names, *columns = zip(*wide.rows, strict=True)
    rows = [(Cell(name), *column) for name, column in zip(wide.head[1:], columns, strict=True)]
    return replace(wide, head=("", *(cell.text for cell in names)), rows=tuple(rows))


def _means(group: Group, rows: Sequence[Row], name: str) -> list[str | Cell]:
    sums = [summary(rows, x, group.dense) for x in group.labels]
    return [name, *[""] * (len(_head(group)) - 1), *map(_mean, sums)]


def _lost(group: Group) -> list[Block]:
    found = {length: group.lost(length) for length in group.lengths}
    told = [f"{', '.join(tasks)} at {length} tokens" for length, tasks in found.items() if tasks]
    if not told:
        return []
    return [Text(
        f"Beyond the model, below {LOST:.0%} with every method: {'; '.join(told)}. Such tasks do not tell methods "
        f"apart, and in the mean of all tasks they hide differences."
    )]  # fmt: skip


def _head(group: Group) -> list[str]:
    return ["task", *(["record"] if len(group.records) > 1 else []), "tokens", "ch/token", "n"]


def _about(group: Group, row: Row) -> list[str]:
    record = [row.record.name] if len(group.records) > 1 else []
    return [row.task, *record, f"{row.tokens:.0f}", f"{row.entry['characters_per_token']:.2f}"]


def _score(result: dict[str, Any], mark: Any) -> Cell:
    failed = f"; {result['failed']} failed" if result["failed"] else ""
    return Cell(percent(result["score"]), interval(result["interval_95"]) + failed, mark)


def _mean(s: Summary) -> Cell:
    return Cell(percent(s.score), interval(s.interval), s.mark)


def _costs(title: str, sums: Sequence[Summary]) -> Table:
    head = ("method", "mean score", "failed", "bytes, prefill", "bytes, decode", "keys", "values", "metadata",
            "time to read", "per token", "answers' length", "same")  # fmt: skip
    rows: list[list[str | Cell]] = []
    for name, s in zip(numbered([s.label for s in sums]), sums, strict=True):
        parts = [percent(s.prefill["total"] if s.prefill else None)]
        parts += [percent(s.decode[k] if s.decode else None) for k in ("total", "keys", "values", "metadata")]
        rows.append([
            name, _mean(s), f"{s.failed} of {s.answers}", *parts, seconds(s.read), seconds(s.per_token),
            times(s.length), percent(s.same),
        ])  # fmt: skip
    return table(title, head, rows)


def _by_task(group: Group, title: str, text: Callable[[dict[str, Any]], str]) -> Table:
    several = len(group.lengths) > 1 or len(group.records) > 1
    rows = [[row.task, *([f"{row.length}"] if several else []), *(text(row.result(x)) for x in group.labels)]
            for row in group.rows]  # fmt: skip
    head = ["task", *(["length"] if several else []), *numbered(group.labels)]
    return _readable(table(title, head, rows, folded=True))


def _share(field: str) -> Callable[[dict[str, Any]], str]:
    return lambda result: percent(result[field]["total"] if result[field] else None)


def _quality(group: Group, sums: dict[int, list[Summary]], file: str) -> list[Block]:
    """A picture for each phase in which some method reads a different amount than dense attention.

    The prefill of a fused prompt reads for fewer rows, so its share of dense attention's bytes is not comparable.
    """
    methods = group.records[0]["methods"]
    blocks: list[Block] = []
    for phase in ("decode", "prefill"):
        panels = []
        for length, found in sums.items():
            reads = {s.label: s.decode if phase == "decode" else s.prefill for s in found}
            shown = [Point(short_label(s.label), n, s.label == group.dense, r["total"], s.score, *s.interval)
                     for n, s in enumerate(found) if (r := reads[s.label]) and r["total"] > 0
                     and not (phase == "prefill" and "fuse" in methods[s.label])]  # fmt: skip
            if any(abs(p.x - 1) > 1e-9 for p in shown):
                tasks = len(group.at(length))
                panels.append(PointPanel(f"{length} tokens, {tasks} task{'s' * (tasks > 1)}", tuple(shown)))
        if panels:
            png = points(panels, f"bytes read in {phase}, over dense's", "mean score (95% interval)")
            blocks.append(Figure(f"{file}-quality-{phase}.png", png, (
                f"Quality against bytes read in {phase}, a point a method: up and to the left is better. Shaded: reads "
                f"more than dense attention, as oracles do."
            )))  # fmt: skip
    return blocks


def _same_for(group: Group, file: str) -> list[Block]:
    """How long answers are the same as dense's; drawn answers differ by chance, so only for greedy ones."""
    if group.dense is None or len(group.labels) < 2 or group.records[0]["config"].get("temperature"):
        return []
    panels = []
    for length in group.lengths:
        apart = {label: _apart(group.at(length), label, group.dense) for label in group.labels if label != group.dense}
        last = max((n for found in apart.values() for n in found if n is not None), default=None)
        if last is None:
            continue
        steps = range(min(last + 2, FURTHEST))
        series = []
        for place, label in enumerate(group.labels):
            if found := apart.get(label):
                left = tuple(sum(n is None or n >= step for n in found) / len(found) for step in steps)
                series.append(Series(short_label(label), place, False, tuple(map(float, steps)), left))
        panels.append(CurvePanel(f"{length} tokens", "tokens of the answer", "answers still as dense's",
                                 tuple(series), steps=True, share=True))  # fmt: skip
    if not panels:
        return []
    return [Figure(f"{file}-divergence.png", curves(panels), (
        "Divergence from dense: the share of answers that are the same as dense attention's up to a token, over all "
        "tasks. Answers that failed are left out."
    ))]  # fmt: skip


def _apart(rows: Sequence[Row], label: str, dense: str) -> list[int | None]:
    return [a["diverges_at"] for row in rows for a in row.beside(label, dense)]
