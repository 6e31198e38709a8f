"""What a model card is made of: the model's folder, logs of its training, records of its evaluation; all checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from longreach.errors import InvalidInput, LongreachError, ModelFileError
from longreach.records.record import read as read_record
from longreach.records.report.reading import Record, load_all
from longreach.records.report.rows import Row
from longreach.records.report.schema import Each, Items, Maybe, Mismatch, Number, Perhaps, check
from longreach.records.weights import weights_sha256
from longreach.tasks import haystack
from longreach.train.mini.checkpoint import CORPUS, Trained

COUNT, SHARE = Number(0, 1 << 62), Number(0, 1)
PLACE = {"seconds": COUNT, "steps": int, "tokens": int}
POINT = {"step": int, "seconds": COUNT, "tokens": int, "lengths": Items(int, least=1), "answer": Number(),
         "text": Perhaps(Number()), "forms": Perhaps(Each(SHARE))}  # fmt: skip
DENSE = "dense"  # what longreach eval calls dense attention
POSITIONS = "max_position_embeddings"
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "intermediate_size", "vocab_size", POSITIONS)  # fmt: skip
CONFIG = {**dict.fromkeys(SIZES, int), "dtype": str}
LOG = {
    "shape": dict,
    "minutes": COUNT,
    "seed": int,
    "resume": Maybe({"from": str, **PLACE}),
    "commit": Maybe(str),
    "dirty": Maybe(bool),
    "versions": Each(Maybe(str)),
    "device": {"type": str, "name": str},
    "parameters": int,
    "curve": Items(POINT, least=1),
    "dev": Perhaps(Items({"tokens": int, "exact": dict})),
}
SOURCE = {"package": str, "version": str, "licence": str}
SOURCES = {"sources": Items(SOURCE, least=1), "tokens": dict, "overlap_window": int, "overlap_hits": int,
           "haystack_sha256": str}  # fmt: skip
ROUNDING = 0.01  # of seconds, in a log


@dataclass(frozen=True)
class TrainingRun:
    """One training log: where it began, and where the next run, or the model, took over."""

    name: str
    content: dict[str, Any]
    begun: Trained
    ended: Trained

    def __getitem__(self, field: str) -> Any:
        return self.content[field]

    @property
    def curve(self) -> list[dict[str, Any]]:
        return list(self.content["curve"])

    @property
    def longest(self) -> int:
        """Tokens of the longest sequences in it."""
        return max(max(point["lengths"]) for point in self.curve)


@dataclass(frozen=True)
class Inputs:
    """config, corpus: the model's JSON files. rows: dense attention's results, each task once at a length."""

    folder: Path
    config: dict[str, Any]
    corpus: dict[str, Any]
    sha256: str
    runs: tuple[TrainingRun, ...]
    records: tuple[Record, ...]
    rows: tuple[Row, ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({row.length for row in self.rows})

    def at(self, task: str, length: int) -> Row | None:
        return next((row for row in self.rows if (row.task, row.length) == (task, length)), None)


def read(model: Path, logs: Sequence[Path], records: Sequence[Path]) -> Inputs:
    """Everything, checked to belong together.

    Raises ModelFileError for the model's own files, InvalidInput for logs and records that are missing, cut short, of
    another version or of another model; each message names the file.
    """
    if not logs:
        raise InvalidInput("no training logs; give the train.json of each run, in order, to --logs")
    config = _model_json(model / "config.json", CONFIG, "the config.json that training writes")
    corpus = _model_json(model / CORPUS, SOURCES, "the manifest.json that --prepare writes, under this name")
    if corpus["haystack_sha256"] != haystack.sha256():
        raise ModelFileError(
            f"{model / CORPUS} was checked for overlap with another haystack than this longreach has; train on what "
            f"this version prepares, or write the card with the version that prepared it"
        )
    sha256, found = weights_sha256(model), load_all(records)
    return Inputs(
        model.resolve(), config, corpus, sha256, _runs(logs, config, _trained(model), model), tuple(found),
        tuple(_rows(found, sha256, model)),
    )  # fmt: skip


def _model_json(path: Path, shape: dict[str, Any], expected: str) -> dict[str, Any]:
    content = _json(path, ModelFileError, expected)
    try:
        check(content, shape)
        for kind, count in content.get("tokens", {}).items():  # of a kind, or of each source of a kind
            check(count, Each(COUNT) if isinstance(count, dict) else COUNT, f"tokens.{kind}")
    except Mismatch as error:
        raise ModelFileError(f"{path}: {error}; expected {expected}") from error
    return content


def _json(path: Path, kind: type[LongreachError], expected: str) -> dict[str, Any]:
    try:
        content = read_record(path)
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror}; expected {expected}") from error
    except (ValueError, RecursionError) as error:
        raise kind(f"{path} is no whole JSON ({error}), as if cut short; expected {expected}") from error
    if not isinstance(content, dict):
        raise kind(f"{path} holds no JSON object; expected {expected}")
    return content


def _trained(model: Path) -> Trained:
    """How far the weights say their training had come."""
    path = model / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            noted = json.loads((file.metadata() or {})["training"])
        return Trained(**noted)
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"cannot read {path} ({error}); give --model a directory that training wrote") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFileError(
            f"{path} has no record of its training progress, so no log can be matched with it; give --model a "
            f"directory that longreach train mini wrote"
        ) from error


def _runs(paths: Sequence[Path], config: dict[str, Any], trained: Trained, model: Path) -> tuple[TrainingRun, ...]:
    """Logs as a chain: each run goes on where the one before ended, and the last one ends with the model's weights."""
    logs = [_log(path, config, model) for path in paths]
    runs: list[TrainingRun] = []
    here = Trained()
    for number, (path, log) in enumerate(zip(paths, logs, strict=True)):
        resumed = log["resume"]
        begun = _place(resumed) if resumed else Trained()
        if not _same(begun, here):
            raise InvalidInput(
                f"{path} is of a run that began at step {begun.steps}, and "
                f"{f'{paths[number - 1]} ended at step {here.steps}' if number else 'a first run begins at 0'}; give "
                f"the logs of all runs, in order"
            )
        later = logs[number + 1]["resume"] if number + 1 < len(logs) else None
        here = _end(path, log, _place(later) if later else None)
        runs.append(TrainingRun(path.name if len(paths) == 1 else f"run {number + 1}", log, begun, here))
    if not _same(here, trained):
        raise InvalidInput(
            f"{paths[-1]} ended at step {here.steps}, and the weights in {model} are of step {trained.steps}: it is "
            f"the log of another model, or logs of later runs are missing"
        )
    return tuple(runs)


def _log(path: Path, config: dict[str, Any], model: Path) -> dict[str, Any]:
    """A log of this version, of a model of this shape."""
    what = "the train.json of a run of longreach train mini"
    log = _json(path, InvalidInput, what)
    try:
        check(log, LOG)
    except Mismatch as error:
        raise InvalidInput(f"{path}: {error}; expected {what}, written by this version of longreach") from error
    rope = config.get("rope_parameters") or {}
    ours = {**config, **rope}
    shape = {name: value for name, value in log["shape"].items() if name != POSITIONS}  # a later run may reach further
    other = sorted(name for name, value in shape.items() if ours.get(name) != value)
    if other:
        told = ", ".join(f"{name} {log['shape'][name]} instead of {ours.get(name)}" for name in other[:3])
        raise InvalidInput(f"{path} is the log of another model than {model}: {told}")
    return log


def _place(noted: dict[str, Any]) -> Trained:
    return Trained(noted["seconds"], noted["steps"], noted["tokens"])


def _end(path: Path, log: dict[str, Any], taken_over: Trained | None) -> Trained:
    """Where a run ended; one that was interrupted, where the next went on from its last checkpoint."""
    try:
        check(log, PLACE)
        return _place(log)
    except Mismatch as error:
        last = log["curve"][-1]
        if taken_over is not None and last["step"] <= taken_over.steps and last["tokens"] <= taken_over.tokens:
            return taken_over
        raise InvalidInput(
            f"{path} is cut short ({error}): its run did not end; give the log of one that did"
        ) from error


def _same(one: Trained, other: Trained) -> bool:
    return (one.steps, one.tokens) == (other.steps, other.tokens) and abs(one.seconds - other.seconds) <= ROUNDING


def _rows(records: Sequence[Record], sha256: str, model: Path) -> Iterator[Row]:
    """Dense attention's results, each task once at a length, of these weights."""
    seen: dict[tuple[str, int], str] = {}
    for record in records:
        name = record.name
        if record.kind != "eval":
            raise InvalidInput(f"{name} is of kind {record.kind!r}; a card reads records of longreach eval")
        if record["model"]["sha256"] != sha256:
            raise InvalidInput(
                f"{name} is of another model: its weights hash to {record['model']['sha256'][:12]}, those in {model} "
                f"to {sha256[:12]}; measure this one with longreach eval --model {model}"
            )
        if DENSE not in record.labels:
            raise InvalidInput(f"{name} has no results of dense attention; measure it with longreach eval")
        for task, entry in record["tasks"].items():
            row = Row(record, task, entry)
            wanted = len(entry["samples"]) * int(record["config"].get("draws") or 1)
            answers = len(row.result(DENSE)["answers"])
            if answers != wanted:
                raise InvalidInput(f"{name} is cut short: {task} has {answers} of {wanted} answers; measure it again")
            other = seen.setdefault((task, row.length), name)
            if other != name:
                raise InvalidInput(f"{other} and {name} both hold {task} at {row.length} tokens; give one of them")
            yield row
