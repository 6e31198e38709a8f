"""The group "user": what a user of transformers and of longreach gets, checked against transformers' own answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.adapters.transformers.loop import decoder, run
from longreach.bench import clock, user
from longreach.bench.case import Target
from longreach.bench.cases import CASES, METHODS, tiny
from longreach.bench.check import WrongResult
from longreach.bench.clock import Clock
from longreach.bench.decoding import Decoding
from longreach.bench.targets import judge
from longreach.bench.user import ATTACHED, CAPTURED, OURS, PIECEWISE, THEIRS, UNCHECKED, Answer, rounding, run_user
from longreach.errors import OutOfMemory
from longreach.methods.base import AttentionMethod, Outcome
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.quest import Quest
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


def test_methods_are_checked_by_their_layers_or_say_why_not(bench: Decoding) -> None:
    result = run_user(bench, replace(CASE, methods=("quest", "mac")), lambda result: None)
    quest, mac = result["entries"][2:]
    assert 0 < quest["error"] <= quest["error_bound"] and "unchecked" not in quest
    assert (mac["error"], mac["error_bound"], mac["unchecked"]) == (None, None, UNCHECKED["mac"])


def test_a_method_whose_layer_is_off_makes_no_record(bench: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_after(Quest, monkeypatch, CASE.shape.context - 1, 1.001)
    with pytest.raises(WrongResult, match=r"quest: attention of layer \d is off by 1.00e-03"):
        run_user(bench, replace(CASE, methods=("quest",)), lambda result: None)


def scaled_after(method: type[AttentionMethod], monkeypatch: pytest.MonkeyPatch, pos: int, factor: float) -> None:
    """Attention of all rows past a position is off by a factor."""
    run = method.run

    def off(self: Any, call: LayerCall, state: Any) -> Outcome:
        outcome = run(self, call, state)
        factors = torch.where(call.rows.pos > pos, factor, 1.0)[:, None, None]
        return outcome._replace(partial=replace(outcome.partial, out=outcome.partial.out * factors))

    monkeypatch.setattr(method, "run", off)


def does_not_fit(*given: Any, **options: Any) -> dict[str, Any]:
    raise OutOfMemory("it does not fit")


@pytest.mark.parametrize("way", ["_attached", "_longreach"])
@pytest.mark.parametrize(("tokens", "refused"), [(3, True), (4, False)])
def test_the_logits_of_four_tokens_are_compared(
    way: str, tokens: int, refused: bool, bench: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt makes the first token, the steps at positions 256, 257 and 258 the others."""
    other = {"_attached": "_longreach", "_longreach": "_attached"}[way]
    monkeypatch.setattr(user, other, does_not_fit)
    scaled_after(Dense, monkeypatch, CASE.shape.context + tokens - 2, 1.01)
    if refused:
        with pytest.raises(WrongResult, match="logits differ from transformers' by"):
            run_user(bench, CASE, lambda result: None)
    else:
        assert len(run_user(bench, CASE, lambda result: None)["entries"]) == 2


def test_peaks_are_of_one_way_and_one_phase(bench: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations of an earlier way, or of the prompt, do not count."""
    peak = [1000]  # of an earlier way

    def reset(device: torch.device) -> None:
        peak[0] = 10  # allocated all the time

    def allocate(size: int) -> None:
        peak[0] = max(peak[0], 10 + size)

    for module in (user, clock):
        monkeypatch.setattr(module, "reset_peak", reset)
        monkeypatch.setattr(module, "peak_bytes", lambda device: peak[0])
    monkeypatch.setattr(user, "allocated_bytes", lambda device: 10)

    def generate(clock: Clock) -> None:
        clock.put(torch.zeros(1))  # the prompt
        allocate(300)
        clock.put(torch.zeros(1))
        allocate(50)
        clock.put(torch.zeros(1))

    _, taken = user.timed(bench, generate, None)
    assert taken["memory"] == {"before": 10, "prefill_peak": 310, "decode_peak": 60}


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
    attached, ours, pieces = result["entries"][2:]
    assert attached["name"] == CAPTURED and attached["error"] <= attached["error_bound"]
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
    assert [target["got"] for target in result["targets"]] == [None] * 3


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
