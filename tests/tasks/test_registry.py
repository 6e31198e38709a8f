"""Every task: fits its room, fills it, is the same for the same numbers, and its answers stand in its text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from tests.tasks.counts import COUNTS, whole

from longreach.errors import InvalidInput, UnknownName
from longreach.tasks.registry import FILES, GROUPS, RULER, TASKS, choose, read, task

ROOM = {"words": 900, "bytes": 9000, "thirds": 3000, "mini": 4000}


@pytest.mark.covering
@pytest.mark.parametrize("unit", COUNTS)
@pytest.mark.parametrize("name", TASKS)
def test_a_sample_fills_its_room_and_holds_its_answers(name: str, unit: str) -> None:
    one, count = task(name), COUNTS[unit]
    for number in range(2):
        sample = one.sample(Random(f"{name}/{number}"), ROOM[unit], count)
        assert 0.9 * ROOM[unit] <= count(whole(sample)) <= ROOM[unit]
        assert all(answer in sample.context for answer in sample.answers)
        assert one.score(" ".join(sample.answers), sample) == 1.0 or name == "plan"
        assert one.score("-", sample) == 0.0
        before, after = sample.context[: sample.instructions], sample.context[sample.instructions :]
        assert (before == "") == (name == "plan") and not before.endswith((" ", "\n")) and before.endswith(("", "."))
        assert name == "plan" or (after[0] in ("\n", " ") and after.strip())
        again = one.sample(Random(f"{name}/{number}"), ROOM[unit], count)
        assert again == sample
    other = one.sample(Random("other"), ROOM[unit], count)
    assert other.context != sample.context


@pytest.mark.covering
@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("name", TASKS)
def test_lengths(name: str, length: int) -> None:
    if name in ("cwe", "vt_official") and length < 1024:
        with pytest.raises(InvalidInput, match=f"^{name} takes at least \\d+ tokens of prompt and {length} are there"):
            task(name).sample(Random(1), length, COUNTS["mini"])
        return
    for number in range(3):
        sample = task(name).sample(Random(number), length, COUNTS["mini"])
        # 60 tokens: a needle with its UUIDs, or a document; a text of 512 is full to the last of them
        assert min(0.9 * length, length - 60) <= COUNTS["mini"](whole(sample)) <= length


@pytest.mark.covering
@pytest.mark.parametrize("unit", ["words", "bytes"])
@pytest.mark.parametrize("name", TASKS)
def test_what_does_not_fit_is_refused_with_the_least_that_does(name: str, unit: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{name} takes at least .* and 20 are there; ask for a longer") as caught:
        task(name).sample(Random(0), 20, COUNTS[unit])
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])  # type: ignore[index]
    sample = task(name).sample(Random(0), least, COUNTS[unit])
    assert COUNTS[unit](whole(sample)) <= least and all(answer in sample.context for answer in sample.answers)
    with pytest.raises(InvalidInput, match=f"^{name} takes at least {least} "):
        task(name).sample(Random(0), least - 1, COUNTS[unit])


@pytest.mark.parametrize("name", TASKS)
def test_little_text_is_counted_to_make_one(name: str) -> None:
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return COUNTS["thirds"](text)

    sample = task(name).sample(Random(0), 8000, count)
    assert sum(counted) <= 12 * len(whole(sample))


def test_samples_are_the_same_in_another_process() -> None:
    code = (
        "from random import Random; from longreach.tasks.registry import choose; import hashlib;"
        "made = [t.sample(Random('s'), 9000, len) for t in choose('all,needle_sweep')];"
        "print([hashlib.sha256(repr(s).encode()).hexdigest() for s in made])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1 and len(next(iter(found))) > 900


def test_listing_loads_no_task() -> None:
    code = (
        "import sys; import longreach.tasks.registry;"
        "print([m for m in sys.modules if m.startswith('longreach.tasks.') or m in ('torch', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(re.findall(r"[\w.]+", done.stdout))
    assert loaded == {"longreach.tasks.registry", "longreach.tasks.base"}


def test_names() -> None:
    for name in TASKS:
        assert task(name).name == name and task(name) == task(name)
        assert task(name).source and task(name).max_new_tokens > 0
    assert len(RULER) == 11
    published = {"vt": 30, "cwe": 120, "fwe": 50}
    assert {n: task(n).max_new_tokens for n in RULER} == {**dict.fromkeys(GROUPS["needles"], 128), **published}


def test_choosing() -> None:
    assert [t.name for t in choose("vt, niah_single_2,vt")] == ["vt", "niah_single_2"]
    assert {t.name for t in choose("all")} == set(GROUPS["all"])
    assert [t.name for t in choose("needles")] == [n for n in RULER if n.startswith("niah")]
    assert [t.name for t in choose("ruler,plan")] == [*RULER, "plan"]
    with pytest.raises(InvalidInput, match="no tasks"):
        choose(" , ")


def test_what_there_is_not() -> None:
    for one in (choose, task):
        with pytest.raises(UnknownName, match=r"unknown task 'niah'; known: niah_single_1, .*qa_1.*ruler"):
            one("niah")
        with pytest.raises(InvalidInput, match=r"qa_1=PATH, or take qa_synthetic_1"):
            one("qa_1")
        with pytest.raises(InvalidInput, match=r"longbench is a data set: give its file, longbench=PATH$"):
            one("longbench")
    with pytest.raises(UnknownName, match=f"unknown data set 'vt'; known: {', '.join(FILES)}"):
        choose("vt=file.json")
    with pytest.raises(UnknownName, match="unknown data set 'squad'"):
        read("squad", Path("file.json"))
