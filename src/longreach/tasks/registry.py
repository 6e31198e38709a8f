"""Which tasks there are, by name, and what users write to choose among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from longreach.errors import InvalidInput, UnknownName
from longreach.tasks import longbench
from longreach.tasks.base import Task
from longreach.tasks.plan import Plan
from longreach.tasks.ruler.common_words import CommonWords
from longreach.tasks.ruler.frequent_words import FrequentWords
from longreach.tasks.ruler.niah import MULTI, SINGLE
from longreach.tasks.ruler.questions import hotpot, squad, synthetic
from longreach.tasks.ruler.tracing import Tracing
from longreach.tasks.sweep import Sweep

TASKS: dict[str, Callable[[], Task]] = {
    **{task.name: partial(replace, task) for task in (*SINGLE, *MULTI)},
    "vt": Tracing,
    "cwe": CommonWords,
    "fwe": FrequentWords,
    "qa_synthetic_1": partial(synthetic, 1),
    "qa_synthetic_2": partial(synthetic, 2),
    "needle_sweep": Sweep,
    "plan": Plan,
}
FILES: dict[str, Callable[[Path], Sequence[Task]]] = {
    "qa_1": lambda path: [squad(path)],
    "qa_2": lambda path: [hotpot(path)],
    "longbench": longbench.tasks,
    "longbench_v2": partial(longbench.tasks, version=2),
}
STAND_INS = {"qa_1": "qa_synthetic_1", "qa_2": "qa_synthetic_2"}
NEEDLES = tuple(task.name for task in (*SINGLE, *MULTI))
RULER = (*NEEDLES, "vt", "cwe", "fwe")
GROUPS = {"needles": NEEDLES, "ruler": RULER, "all": (*RULER, "qa_synthetic_1", "qa_synthetic_2", "plan")}


def choose(text: str) -> list[Task]:
    """Tasks named in "a,b": names, groups (needles, ruler, all), data sets with their file ("qa_1=squad.json").

    Where qa_1 or qa_2 is given a file, its synthetic stand-in leaves the groups.
    Raises UnknownName for a task there is not, InvalidInput where a data set lacks its file or none is named.
    """
    found: dict[str, Task] = {}
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise InvalidInput(f"no tasks; name some of {', '.join((*TASKS, *GROUPS))}")
    for name in names:
        dataset, equals, path = name.partition("=")
        if equals and dataset in FILES:
            found |= {task.name: task for task in FILES[dataset](Path(path))}
        elif name in FILES:
            instead = f", or take {STAND_INS[name]}" if name in STAND_INS else ""
            raise InvalidInput(f"{name} is a data set: give its file, {name}=PATH{instead}")
        elif name in GROUPS:
            found |= {n: TASKS[n]() for n in GROUPS[name] if n not in found}
        elif name in TASKS:
            found[name] = TASKS[name]()
        else:
            raise UnknownName("task", name, (*TASKS, *FILES, *GROUPS))
    for dataset, instead in STAND_INS.items():
        if dataset in found and instead not in names:
            found.pop(instead, None)
    return list(found.values())
