"""The group "user": what a user of transformers and of longreach gets, checked against transformers' own answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.adapters.transformers.loop import decoder, run
from longreach.bench import user
from longreach.bench.case import Target
from longreach.bench.cases import CASES, METHODS, tiny
from longreach.bench.check import WrongResult
from longreach.bench.decoding import Decoding
from longreach.bench.targets import judge
from longreach.bench.user import ATTACHED, OURS, PIECEWISE, THEIRS, Answer, rounding, run_user
from longreach.methods.dense import Dense
from tests.adapters.transformers.fake_graph import FakeGraph

CASE = tiny(CASES["user-8k-b4"])


def noted(graphs: list[FakeGraph]) -> Callable[[], FakeGraph]:
    def make() -> FakeGraph:
        graphs.append(FakeGraph())
        return graphs[-1]

    return make


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Decoding:
    monkeypatch.setattr(user, "TIMED", 2)
    monkeypatch.setattr(user, "NEW", 6)
    return Decoding(torch.device("cpu"), without=(), quick=True, seed=0, say=lambda line: None)


def test_all_ways_have_times_memory_and_checked_tokens(bench: Decoding) -> None:
    saved: list[dict[str, Any]] = []
    result = run_user(bench, replace(CASE, methods=("dense", "quest")), saved.append)
    assert [e["name"] for e in result["entries"]] == [THEIRS, ATTACHED, OURS, f"{OURS}, quest"]
    assert [e["who"] for e in result["entries"]] == ["transformers", *["longreach"] * 3]
    assert [len(partial["entries"]) for partial in saved] == [1, 2, 3, 4]
    for entry in result["entries"]:
        assert 0 <= entry["error"] <= entry["error_bound"] < 1e-3
        assert entry["ttft_seconds"] > 0 and len(entry["microseconds"]["replays"]) == 2
        assert entry["memory"] == {"before": None, "prefill_peak": None, "decode_peak": None}  # a CPU's


def test_piecewise_is_a_way_where_steps_are_captured(bench: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that claims to capture: FakeGraph takes the place of CUDA's."""
    graphs: list[FakeGraph] = []
    monkeypatch.setattr(decoder, "cuda_graphs", lambda device: noted(graphs))
    monkeypatch.setattr(
        run, "capture_for", lambda session, graph: ("piecewise" if graph == "piecewise" else None, None)
    )
    monkeypatch.setattr(user, "captures", lambda device: True)
    case = replace(CASE, targets=(Target("time over", 1.35, PIECEWISE, OURS),))
    result = run_user(bench, case, lambda result: None)
    ours, pieces = result["entries"][2:]
    assert (ours["name"], pieces["name"]) == (OURS, PIECEWISE) and len(graphs) >= 3
    assert (ours["settings"]["captured"], pieces["settings"]["captured"]) == (None, "piecewise")
    assert pieces["error"] <= pieces["error_bound"] and pieces["microseconds"]["median"] > 0


def test_another_token_than_rounding_explains_makes_no_record(bench: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Dense.run
    monkeypatch.setattr(Dense, "run", lambda self, call, state: (o := run(self, call, state))._replace(
        partial=replace(o.partial, out=o.partial.out.roll(1, 1))
    ))  # fmt: skip
    with pytest.raises(WrongResult, match="the logit of a chosen token is"):
        run_user(bench, CASE, lambda result: None)


@pytest.mark.parametrize(("name", "why"), [("behind", "logit of a chosen token"), ("off", "logits differ from")])
def test_a_difference_a_little_past_its_bound_is_refused(
    name: str, why: str, bench: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user, "rounding", lambda model, ids: user.Rounding(1e-3, 1e-2))
    monkeypatch.setattr(Answer, name, lambda self, *a: {"behind": 2e-2, "off": 2e-3}[name])
    with pytest.raises(WrongResult, match=why):
        run_user(bench, CASE, lambda result: None)


def test_logits_are_compared_while_answers_agree() -> None:
    mine, other = Answer(), Answer()
    for logits in ([[3.0, 4.0]], [[4.0, 3.0]], [[0.0, 1.0]]):
        mine(torch.empty(0), torch.tensor(logits))
    for logits in ([[3.0, 4.5]], [[2.0, 3.0]], [[9.0, 0.0]]):
        other(torch.empty(0), torch.tensor(logits))
    assert mine.off(other) == pytest.approx(2 / 5)  # the third follows another token


def test_what_does_not_fit_is_named_and_one_prompt_is_the_reference(
    bench: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = user.timed

    def small(bench: Any, call: Any, profiled: Any, at: Any = None) -> Any:
        if profiled and not tried:
            tried.append(1)
            raise torch.OutOfMemoryError("too large")
        return timed(bench, call, profiled, at)

    tried: list[int] = []
    monkeypatch.setattr(user, "timed", small)
    case = replace(CASE, targets=CASES["user-8k-b4"].targets)  # tiny ones have none
    result = run_user(bench, case, lambda result: None)
    assert [e["name"] for e in result["entries"]] == [ATTACHED, OURS]
    assert result["left_out"] == {THEIRS: "out of memory: too large"}
    assert [target["got"] for target in result["targets"]] == [None, None]


def test_tokens_are_compared_while_answers_agree() -> None:
    answer = Answer()
    for logits in ([[0.0, 1.0, 3.0], [5.0, 4.0, 0.0]], [[2.0, 0.0, 0.0], [0.0, 1.0, 9.0]]):
        answer(torch.empty(0), torch.tensor(logits))
    assert answer.behind(torch.tensor([[2, 0], [0, 2]]), 2) == 0
    assert answer.behind(torch.tensor([[1, 1], [0, 2]]), 2) == 2  # what follows another token is another answer
    assert answer.behind(torch.tensor([[2, 0], [1, 0]]), 2) == 1
    assert answer.behind(torch.tensor([[2, 1], [0, 0]]), 2) == 9
    assert answer.behind(torch.tensor([[2, 1], [0, 0]]), 1) == 0
    assert answer.behind(torch.tensor([[2, 0], [0, 2], [0, 0]]), 2) == 0  # the reference has two prompts


def test_the_bound_is_a_few_roundings_of_the_model(bench: Decoding) -> None:
    """In fp32 a logit is off by some 1e-6: a bound that is a hundred times too wide has to be seen."""
    model, _ = bench.model(CASE)
    ids = bench.tokens(CASE, model, 64)
    found = rounding(model, ids)
    assert 1e-8 < found.logits < 1e-5 and 1e-8 < found.behind < 3e-5


def test_peak_memory_is_compared_phase_by_phase() -> None:
    target = Target("peak memory over", 1.03, OURS, THEIRS)
    case = replace(CASE, targets=(target,))

    def entries(*ours: int | None) -> list[dict[str, Any]]:
        both = (THEIRS, "transformers", (100, 50)), (OURS, "longreach", ours)
        return [
            {"name": name, "who": who, "memory": dict(zip(("prefill_peak", "decode_peak"), peaks, strict=True))}
            for name, who, peaks in both
        ]

    (found,) = judge(case, entries(101, 52))
    assert found["got"] == pytest.approx(1.04) and not found["reached"]
    assert judge(case, entries(103, 50))[0]["reached"]
    assert judge(case, entries(None, None))[0]["got"] is None
    assert judge(case, entries(103, 50)[:1])[0]["got"] is None


def test_cases() -> None:
    cases = [case for case in CASES.values() if case.group == "user"]
    assert {(c.shape.batch, c.shape.context) for c in cases if c.methods == ("dense",)} == {
        (batch, context << 10) for batch in (1, 4) for context in (8, 32, 128)
    }
    assert [c.name for c in cases if c.methods == METHODS] == ["user-32k-b1-methods"]
    assert all(c.targets for c in cases if c.methods == ("dense",))
