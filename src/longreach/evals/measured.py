"""An evaluation as a record: the methods' answers and scores, and from Python in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longreach.evals.batching import fitting_batch
from longreach.evals.evaluate import Evaluation, Settings
from longreach.evals.methods import refuse_slots, specs
from longreach.evals.model_info import info_of
from longreach.evals.progress import Progress, unseen
from longreach.evals.scores import tasks_entry
from longreach.records import Journal, check_writable, environment, write
from longreach.tasks import registry

FORMAT = 1
COMPARED_WITH = (
    "With fuse, prefill bytes are over those of dense attention for the rows that ran, not for the whole prompt; with "
    "evict, decode bytes are over those of dense attention after eviction, over the kept keys."
)


def measured(
    evaluation: Evaluation,
    about: dict[str, Any],
    output: Path | None = None,
    progress: Progress = unseen,
    prepare: Callable[[], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """The record, written to `output` where given; parts from an interrupted run's journal are kept.

    about: entries on model, settings and machine. prepare: called once prompts are there and before any is asked; may
    change the evaluation's methods, and returns entries of the record. If answers failed the journal stays too, so the
    same call computes only those again.
    """
    sources = {t.task.name: t.task.source for t in evaluation.tasks.values()}  # data sets with the hash of their file
    began = time.perf_counter()
    try:
        evaluation.build(progress)
        said = prepare()
        about = {**about, "methods": {spec.label: spec.to_json() for spec in evaluation.specs}, **said}
        with Journal(output, {**about, "tasks": sources}) as journal:
            parts = evaluation.run(journal.done, journal.add, progress)
        seconds = {"wall": time.perf_counter() - began}  # of this run: prompts made, and what was still to be answered
        record = {
            "kind": "eval", "format": FORMAT, **about, **_compared_with(about["methods"]), "seconds": seconds,
            "tasks": tasks_entry(evaluation, parts),
        }  # fmt: skip
    finally:
        evaluation.close()
    if output is not None:
        write(output, record)
    if not failed_answers(record):
        journal.remove()
    return record


def _compared_with(methods: dict[str, Any]) -> dict[str, str]:
    """The record's entry on the dense attention that bytes are compared with, where some method fuses or evicts."""
    fuses = any({"fuse", "evict"} & method.keys() for method in methods.values())
    return {"bytes_compared_with": COMPARED_WITH} if fuses else {}


def failed_answers(record: dict[str, Any]) -> int:
    """Answers of a record that failed with an error."""
    return sum(result["failed"] for task in record["tasks"].values() for result in task["results"].values())


def evaluate(
    model: Any,
    tokenizer: Any,
    *,
    tasks: str = "needles",
    methods: Sequence[str] = (),
    length: int | Sequence[int] = 4096,
    samples: int | None = None,
    seed: int = 0,
    batch: int | None = None,
    prefill_chunk_size: int = 512,
    question: str = "prefill",
    output: str | Path | None = None,
    progress: Progress = unseen,
) -> dict[str, Any]:
    """Ask a model long-context tasks with every method; the record of `longreach eval`.

    model, tokenizer: as `longreach.load` returns them, or transformers' own; not attached.
    tasks: names as for `longreach eval --tasks`, such as "vt,cwe", "needles" or "ruler".
    methods: as for --method, "quest k=0.2"; dense attention is always there.
    length: tokens of a prompt and its answer, or several lengths.
    samples: prompts a task and length, 20 by default (of a data set all).
    batch: prompts at a time, by default as many as memory holds.
    question: "prefill" or "decode": read with the prompt, or token by token by each method.
    output: a file for the record, compressed if it ends in .gz; the same call continues an interrupted run.

    Returns a dict: tasks -> name -> results -> method -> score, answers, decode_reads (shares of dense attention's
    bytes), seconds and others; methods, model, config, versions and device. A score is the mean over prompts, 0 to 1.
    Raises UnknownName (task or method), InvalidInput (lengths, a task that cannot be built), Unsupported (the model).
    """
    chosen = specs(methods)
    refuse_slots(chosen, ("fuse",), "chunks are cut by `longreach eval`")
    lengths = (length,) if isinstance(length, int) else tuple(length)
    place = None if output is None else Path(output)
    if place is not None:
        check_writable(place)
    size = batch or fitting_batch(model, max(lengths), prefill_chunk_size)
    settings = Settings(lengths, samples, seed=seed, batch=size, chunk=prefill_chunk_size, question=question)
    evaluation = Evaluation(model, tokenizer, registry.choose(tasks), chosen, settings)
    about = {"model": info_of(model), "config": evaluation.config()}
    return measured(evaluation, {**about, **environment(model.device)}, place, progress)
