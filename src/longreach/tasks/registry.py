"""Which tasks there are, by name, and what users write to choose among them. Strings, so that listing loads none."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from longreach.errors import InvalidInput, UnknownName
from longreach.tasks.base import Task

NEEDLES = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
)
TASKS = {  # what makes a task, called with its name
    **dict.fromkeys(NEEDLES, "longreach.tasks.ruler.niah:niah"),
    "vt": "longreach.tasks.ruler.tracing:Tracing",
    "cwe": "longreach.tasks.ruler.common_words:CommonWords",
    "fwe": "longreach.tasks.ruler.frequent_words:FrequentWords",
    "vt_official": "longreach.tasks.ruler.tracing:official",
    "fwe_official": "longreach.tasks.ruler.frequent_words:official",
    "qa_synthetic_1": "longreach.tasks.ruler.invented:questions",
    "qa_synthetic_2": "longreach.tasks.ruler.invented:questions",
    "needle_sweep": "longreach.tasks.sweep:Sweep",
    "plan": "longreach.tasks.plan:Plan",
}
FILES = {  # what reads a task, or several, from a data set
    "qa_1": "longreach.tasks.ruler.datasets:squad",
    "qa_2": "longreach.tasks.ruler.datasets:hotpot",
    "longbench": "longreach.tasks.longbench.v1:read",
    "longbench_v2": "longreach.tasks.longbench.v2:read",
}
ABOUT = {  # what a data set's file is
    "qa_1": "RULER's question answering on a JSON file of SQuAD",
    "qa_2": "RULER's question answering on a JSON file of HotpotQA",
    "longbench": "LongBench: a JSONL file of its data, or a folder of them",
    "longbench_v2": "LongBench v2: its JSON or JSONL file",
}
STAND_INS = {"qa_1": "qa_synthetic_1", "qa_2": "qa_synthetic_2"}
RULER = (*NEEDLES, "vt", "cwe", "fwe")
RULER_OFFICIAL = (*NEEDLES, "vt_official", "cwe", "fwe_official")  # the text that RULER's own generators write
GROUPS = {
    "needles": NEEDLES,
    "ruler": RULER,
    "ruler_official": RULER_OFFICIAL,
    "all": (*RULER, "qa_synthetic_1", "qa_synthetic_2", "plan"),
}


def task(name: str) -> Task:
    """The task of that name. Raises UnknownName, or InvalidInput for a data set, which takes its file."""
    if name in FILES:
        instead = f", or take {STAND_INS[name]}" if name in STAND_INS else ""
        raise InvalidInput(f"{name} is a data set: give its file, {name}=PATH{instead}")
    if name not in TASKS:
        raise UnknownName("task", name, (*TASKS, *FILES, *GROUPS))
    made: Task = _loaded(TASKS[name])(name=name)
    return made


def read(dataset: str, path: Path) -> list[Task]:
    """The tasks that a data set's file holds. Raises UnknownName, or InvalidInput for what is not the official file."""
    if dataset not in FILES:
        raise UnknownName("data set", dataset, FILES)
    found = _loaded(FILES[dataset])(path)
    return found if isinstance(found, list) else [found]


def choose(text: str) -> list[Task]:
    """Tasks named in "a,b": names, groups (needles, ruler, ...), data sets with their file ("qa_1=squad.json").

    Where qa_1 or qa_2 is given a file, its synthetic stand-in leaves the groups.
    Raises UnknownName for a task there is not, InvalidInput where a data set lacks its file or none is named.
    """
    found: dict[str, Task] = {}
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise InvalidInput(f"no tasks; name some of {', '.join((*TASKS, *GROUPS))}")
    for name in names:
        dataset, equals, path = name.partition("=")
        if equals:
            found |= {one.name: one for one in read(dataset, Path(path))}
        else:
            found |= {n: task(n) for n in GROUPS.get(name, (name,)) if n not in found}
    for dataset, instead in STAND_INS.items():
        if dataset in found and instead not in names:
            found.pop(instead, None)
    return list(found.values())


def _loaded(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
