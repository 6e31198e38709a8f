"""MAC in a model's loop, forced: its steps are the model's with a window, and where their time goes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from longreach.bench.case import USER, Case
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.decoding import REPLAYS, Decoding
from longreach.bench.mac import decoding as mac
from longreach.cache.ring import RowRing
from longreach.errors import InvalidInput, OutOfMemory
from longreach.methods.mac.state import LayerState

CASE = tiny(CASES["8b-mac-128k-b4"])
GPU = torch.device("cuda")


def bench(*without: str, steps: int = 8) -> Decoding:
    made = Decoding(torch.device("cpu"), without=without, quick=True, seed=0, say=lambda line: None)
    made.steps = steps
    return made


def test_a_forced_step_is_checked_against_a_window_and_told_apart() -> None:
    result = bench(steps=16).run(CASE)
    names = ["captured step", "generate", "mac: captured step", "mac: generate"]
    assert [e["name"] for e in result["entries"]] == names
    assert result["forced"].startswith("Hits are forced") and result["method"]["back"] == 20
    assert result["check_forced"]["steps"] == 16
    assert result["entries"][2]["error"] == result["check_forced"]["error"] <= result["check_forced"]["error_bound"]
    parts = result["phases"]["microseconds"]
    steps = {"dense": result["entries"][0], "mac": result["entries"][2]}
    for who, step in steps.items():
        assert sum(parts[who].values()) == pytest.approx(step["microseconds"]["median"])
    assert list(parts["mac"]) == ["match and ring", "attention and merge", "append", "rest"]


def test_another_row_than_the_forced_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    force = LayerState.force
    monkeypatch.setattr(LayerState, "force", lambda self, gap: force(self, gap + 1))
    with pytest.raises(WrongResult, match="logits differ"):
        bench("transformers_static").run(CASE)


def test_rings_hold_every_row_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest too: it is the one that is gone on from `back` steps later."""
    force, stamps = LayerState.force, list[torch.Tensor]()

    def look(self: LayerState, gap: int) -> None:
        stamps.append(self.ring.stamp.clone())
        force(self, gap)

    monkeypatch.setattr(LayerState, "force", look)
    bench("transformers_static").run(CASE)
    tokens, size = CASE.shape.context, stamps[0].shape[1]
    want = torch.arange(tokens - size, tokens, dtype=stamps[0].dtype).expand(CASE.shape.batch, -1)
    assert len(stamps) == 2 and all(torch.equal(found.sort(1).values, want) for found in stamps)


@pytest.mark.sweep  # as another row than the forced one
def test_steps_that_find_nothing_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerState, "force", lambda self, gap: None)
    with pytest.raises(WrongResult, match="logits differ"):
        bench().run(CASE)


def test_as_many_sequences_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["8b-mac-128k-most"]
    assert mac.as_many_as_fit(case, torch.device("cpu")) == case.shape.batch
    memory = SimpleNamespace(free=0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory.free, 0))
    one = 32 * 2 * 131072 * 8 * 128 * 2
    memory.free = 3 * one + mac.RESERVED  # rings, and a layer's keys that are drawn, take 4.8 + 3.1 percent more
    assert mac.as_many_as_fit(case, GPU) == 2
    memory.free = int(3 * 1.08 * one) + mac.RESERVED
    assert mac.as_many_as_fit(case, GPU) == 3
    memory.free = one
    with pytest.raises(OutOfMemory, match="not one sequence of 131072"):
        mac.as_many_as_fit(case, GPU)


FORCED = [case for case in CASES.values() if case.model and case.reuse and case.group != USER]


@pytest.mark.parametrize("case", [*FORCED, *map(tiny, FORCED)], ids=lambda case: f"{case.name} {case.shape.context}")
def test_steps_leave_the_row_to_reuse_in_the_ring(case: Case) -> None:
    made = bench(steps=REPLAYS)
    method = mac.forced(case, made.rows)
    ring = RowRing(1, 1, 1, 1, method.window, torch.empty(0)).ring
    after = range(case.shape.context + made.rows - ring.size, case.shape.context)  # rows that a cut leaves
    assert case.shape.context - method.back in after


def test_a_row_that_steps_overwrite_is_refused() -> None:
    for changed, steps in ((CASE, 117), (replace(CASE, shape=replace(CASE.shape, context=20)), 1)):
        with pytest.raises(InvalidInput, match="forced hits 20 rows back need a context of more than 20"):
            mac.forced(changed, steps)
    assert mac.forced(CASE, 116).window == 128
