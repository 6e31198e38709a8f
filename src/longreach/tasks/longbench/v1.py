"""LongBench's files: one data set each, as JSONL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from longreach.errors import InvalidInput, UnknownName
from longreach.tasks.base import Sample
from longreach.tasks.longbench.base import Fixed
from longreach.tasks.longbench.datasets import DATASETS, SOURCE, Dataset
from longreach.tasks.longbench.files import Entry, check_fields, entries
from longreach.tasks.longbench.metrics import NUMBER, check_packages, classification, first_line
from longreach.tasks.sources import of_file

FIELDS = {"input": str, "context": str, "answers": list, "length": int, "dataset": str, "language": str, "_id": str}
EVEN = "_e"  # LongBench-E: the same data sets, evenly spread over lengths
RANGES = ((4000, "0-4k"), (8000, "4-8k"))  # words, below which a text is of that range; results are split by them
BEYOND = "8k+"


def read(path: Path) -> list[Fixed]:
    """A task for each data set in the file, or in the .jsonl files of a folder. Raises InvalidInput, Unsupported."""
    if not path.is_dir():
        return _tasks(path)
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise InvalidInput(f"{path} holds no .jsonl file; give LongBench's data folder, or one of its files")
    found: dict[str, Fixed] = {}
    for file in files:
        for task in _tasks(file):
            if task.name in found:
                raise InvalidInput(f"{file}: {task.name} is in another file of {path} too; give one of them")
            found[task.name] = task
    return list(found.values())


def _tasks(path: Path) -> list[Fixed]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries(path):
        check_fields(entry, FIELDS)
        place, values = entry
        if values["dataset"].removesuffix(EVEN) not in DATASETS:
            raise InvalidInput(f"{place}: {UnknownName('LongBench data set', values['dataset'], DATASETS)}")
        groups.setdefault(values["dataset"], []).append(entry)
    source = of_file(SOURCE, path)
    return [_task(_named(path, name), name.removesuffix(EVEN), group, source) for name, group in groups.items()]


def _named(path: Path, dataset: str) -> str:
    """LongBench-E's files are recognised by name, as their lines do not differ from LongBench's."""
    return f"longbench_{path.stem if path.stem == dataset + EVEN else dataset}"


def _task(name: str, dataset: str, group: list[Entry], source: str) -> Fixed:
    about = DATASETS[dataset]
    check_packages(about.measure, name)
    measure = partial(classification, classes=_classes(group)) if about.measure is classification else about.measure
    samples = tuple(_sample(about, entry) for entry in group)
    by = ("length_range",) if name.endswith(EVEN) else ()
    metric = partial(_best, measure, about.one_line)
    return Fixed(name, source, about.max_new_tokens, samples, metric, about.chat, by)


def _best(measure: Callable[[str, str], float], one_line: bool, answer: str, expected: Sequence[str]) -> float:
    judged = first_line(answer) if one_line else answer
    return max(measure(judged, text) for text in expected)


def _sample(about: Dataset, entry: Entry) -> Sample:
    place, values = entry
    for text in values["answers"]:
        if about.numbered and not NUMBER.search(text):
            raise InvalidInput(f"{place}: the field 'answers' should hold a number, got {text[:40]!r}")
    given = {"context": values["context"], "input": values["input"]}
    return Sample(
        about.text.format(**given),
        about.question.format(**given),
        about.begun,
        tuple(values["answers"]),
        {"id": values["_id"], "length": values["length"], "length_range": length_range(values["length"]),
         "language": values["language"]},
    )  # fmt: skip


def length_range(words: int) -> str:
    """The range of LongBench-E for a text of `words` words."""
    return next((name for below, name in RANGES if words < below), BEYOND)


def _classes(group: list[Entry]) -> tuple[str, ...]:
    """The classes to choose from, as all lines together name them."""
    found: dict[str, None] = {}
    for entry in group:
        check_fields(entry, {"all_classes": list})
        found |= dict.fromkeys(entry[1]["all_classes"])
    return tuple(found)
