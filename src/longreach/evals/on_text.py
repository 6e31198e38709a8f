"""Perplexity and comparison of methods on a text, as a record and in one call from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longreach.evals.compare import Compare, Comparison
from longreach.evals.methods import specs
from longreach.evals.model_info import info_of
from longreach.evals.perplexity import Perplexity, text_of
from longreach.evals.progress import Progress, unseen
from longreach.records import Journal, check_writable, environment, write

FORMAT = 1
PASS_TOKENS = 512  # of a pass over a prompt, as on the command line


def measured(
    task: Perplexity, about: dict[str, Any], chunk: int, output: Path | None = None, progress: Progress = unseen
) -> dict[str, Any]:
    """The record, written to `output` where given; windows from an interrupted run's journal are kept.

    about: entries on model, settings, texts and machine. Raises as `Perplexity.run`.
    """
    said = {**about, "methods": {spec.label: spec.to_json() for spec in task.specs}}
    with Journal(output, said) as journal:
        found, failed = task.run(chunk, progress, done=journal.done, keep=journal.add)
    results = {spec.label: found[spec.label] for spec in task.specs if spec.label in found}
    record = {"kind": "perplexity", "format": FORMAT, **said, "results": results, "failed": failed}
    if output is not None:
        write(output, record)
    if not failed:
        journal.remove()
    return record


def perplexity(
    model: Any,
    tokenizer: Any,
    texts: str | Path | Sequence[str | Path],
    *,
    methods: Sequence[str] = (),
    length: int = 4096,
    decode_tokens: int = 256,
    limit: int | None = None,
    prefill_chunk_size: int = PASS_TOKENS,
    output: str | Path | None = None,
    progress: Progress = unseen,
) -> dict[str, Any]:
    """How well a model predicts texts with every method; the record of `longreach perplexity`.

    model, tokenizer: as `longreach.load` returns them, or transformers' own; not attached.
    texts: a text or several: str is the text itself, Path a UTF-8 file.
    methods: as for --method, "quest k=0.2"; dense attention is always there.
    length: tokens of a window. decode_tokens: of a window's end, fed one by one through the decode method; 0 for none.
    limit: the most windows that are read; None: all. prefill_chunk_size: tokens of a pass.
    output: a file for the record; the same call continues an interrupted run.

    Returns a dict: results -> method -> prefill and decode -> nll (nats a token), perplexity, by_position, by_window;
    decode_reads (shares of dense attention's bytes); methods, model, config, versions and device.
    Raises InvalidInput (texts, lengths), UnknownName (method), Unsupported (the model), MeasurementFailed.
    """
    chosen, place = specs(methods), None if output is None else Path(output)
    if place is not None:
        check_writable(place)
    given = [texts] if isinstance(texts, (str, Path)) else list(texts)
    read = [text_of(one, number, tokenizer) for number, one in enumerate(given)]
    task = Perplexity(model, tokenizer, read, chosen, length=length, decode_tokens=decode_tokens, limit=limit)
    config = {"length": length, "decode_tokens": decode_tokens, "windows": len(task.windows), "limit": limit,
              "prefill_chunk_size": prefill_chunk_size}  # fmt: skip
    about = {"model": info_of(model), "config": config, **environment(model.device)}
    about["files"] = [text.to_json() for text in read]
    return measured(task, about, prefill_chunk_size, place, progress)


def compare(
    model: Any,
    tokenizer: Any,
    document: str,
    *,
    question: str = "What is this text about?",
    methods: Sequence[str] | None = None,
    steps: int = 32,
    layers: bool = False,
    past_end: bool = False,
    progress: Progress = unseen,
) -> list[Comparison]:
    """Each method beside dense attention on one document, as `longreach compare`: what it changes, and what it saves.

    model, tokenizer: as `longreach.load` returns them, or transformers' own; not attached. document: its text.
    methods: as for --method, "quest k=0.2"; None: all that fit the model with their default options.
    steps: decode steps compared; every method is fed dense attention's own answer. layers: measure the error of each
    layer on the same hidden states too. past_end: run all steps even if that answer ends earlier.

    Returns a Comparison for each method, dense attention first: label, kl (nats), first_divergence, decode_reads
    (shares of dense attention's bytes), seconds_per_token and others.
    Raises InvalidInput (a prompt too long), UnknownName (method), Unsupported (the model).
    """
    from longreach.adapters.transformers import prompts

    shared, (rest,) = prompts(tokenizer, document, [question])
    chosen = None if methods is None else specs(methods)
    task = Compare(model, tokenizer, shared + rest, steps=steps, specs=chosen, layers=layers, past_end=past_end)
    return list(task.run(PASS_TOKENS, progress))
