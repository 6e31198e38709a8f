"""Prompts made by worker processes: those that would be made here, and their errors; processes that die or are left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from longreach.errors import InvalidInput, LongreachError
from longreach.evals import prompt_workers
from longreach.evals.prompt_workers import Workers
from longreach.evals.prompting import Maker, at_lengths
from longreach.tasks import registry
from longreach.tasks.base import Count, Sample
from longreach.testing.tiny import tiny_tokenizer
from tests.tiers import swept

contexts = {name: multiprocessing.get_context(name) for name in ("fork", "spawn")}
LENGTH, TOTALS = 1500, {"niah_single_2": 3, "needle_sweep": 3, "fails": 3}


@dataclass(frozen=True)
class Fails:
    """Makes no sample. dies: takes its process with it. seconds: how long it takes to fail."""

    name: str = "fails"
    source: str = "made for a test"
    max_new_tokens: int = 4
    dies: bool = False
    seconds: float = 0.0

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        time.sleep(self.seconds)
        if self.dies:
            os._exit(7)
        raise InvalidInput(f"{self.name}: no {random.randrange(1000)} in {room} tokens")

    def score(self, answer: str, sample: Sample) -> float:
        return 0.0


def maker(*tasks: Any) -> Maker:
    return Maker(at_lengths(tasks, [LENGTH]), tiny_tokenizer(), seed=3)


@pytest.fixture(scope="module", params=swept(["fork", "spawn"], 1))
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Forked: a process that loads all modules takes seconds to start. tests/cli/test_eval.py starts one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_workers.multiprocessing, "get_context", lambda _: contexts[request.param])
        made = Workers(maker(registry.task("niah_single_2"), registry.task("needle_sweep"), Fails()), TOTALS, 2)
    for pid in list(made._pool._processes):  # what Ctrl-C sends to all processes of a terminal
        os.kill(pid, signal.SIGINT)
    yield made
    made.close()


def test_they_make_the_prompts_that_are_made_here(workers: Workers) -> None:
    here = maker(*map(registry.task, list(TOTALS)[:2]))
    for name, total in list(TOTALS.items())[:2]:
        expected = [here.make(name, number, total) for number in reversed(range(total))][::-1]
        assert list(workers.samples[name]) == expected and len(workers.samples[name]) == total
        assert workers.samples[name][1:9] == expected[1:]
    assert {one.sample.facts["depth"] for one in workers.samples["needle_sweep"]} == {0.0, 0.5, 1.0}


def test_errors_are_those_of_here(workers: Workers) -> None:
    for number in range(TOTALS["fails"]):
        with pytest.raises(InvalidInput) as here:
            maker(Fails()).make("fails", number, TOTALS["fails"])
        with pytest.raises(InvalidInput) as there:
            workers.samples["fails"][number]
        assert str(there.value) == str(here.value)
    assert len(workers.samples["niah_single_2"][:2]) == 2  # one task's errors are not another's


def test_a_dead_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_workers.multiprocessing, "get_context", lambda _: contexts["fork"])
    dying = Workers(maker(Fails(dies=True)), {"fails": 1}, 1)
    with pytest.raises(LongreachError, match=r"died .*fewer --workers"):
        dying.samples["fails"][0]
    dying.close()


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(LongreachError, match="use --workers 0"):
        Workers(maker(Fails(name=lambda: None)), {"fails": 1}, 1)  # type: ignore[arg-type]


def test_ending_waits_for_nothing_unbegun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_workers.multiprocessing, "get_context", lambda _: contexts["fork"])
    left = Workers(maker(Fails(seconds=0.5)), {"fails": 500}, 1)  # 250 s in all
    left.close()
    assert sum(one.cancelled() for one in left.samples["fails"]._coming) > 400
