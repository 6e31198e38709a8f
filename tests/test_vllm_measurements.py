"""What the scripts in benchmarks/vllm print and judge, from made-up measurements. Without vLLM, and without a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from longreach.errors import InvalidInput
from tests.doc_tables import ROOT


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"vllm_{name}", ROOT / "benchmarks" / "vllm" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(method: str, one: float, four: float, fit: float, count: int) -> list[dict[str, Any]]:
    batches = (1, False, one), (4, False, four), (count, True, fit)
    return [
        {"case": "tpot-128k", "method": method, "batch": batch, "fits": fits, "tpot_ms": ms}
        for batch, fits, ms in batches
    ]


def test_ratios_are_of_the_same_batch(capsys: pytest.CaptureFixture[str]) -> None:
    measure = script("measure")
    measure.show([*lines("FLASH_ATTN", 9.0, 20.0, 28.0, 6), *lines("kascade", 6.0, 10.0, 14.0, 5)], "kascade")
    assert capsys.readouterr().out.splitlines() == [
        "tpot-128k kascade batch 1: tpot_ms 6.000  1.500x of FLASH_ATTN (to reach: 1.25x)",
        "tpot-128k kascade batch 4: tpot_ms 10.000  2.000x of FLASH_ATTN (to reach: 2.0x)",
        "tpot-128k kascade batch 5: tpot_ms 14.000  1.667x of FLASH_ATTN with batch 6 (to reach: 2.5x)",
    ]


def test_higher_throughput_is_better(capsys: pytest.CaptureFixture[str]) -> None:
    measure = script("measure")
    same = {"case": "load", "batch": 32, "gap_p99_ms": 40.0}
    plain = {**same, "method": "FLASH_ATTN", "tokens_per_second": 100.0, "tpot_p50_ms": 12.0}
    ours = {**same, "method": "kascade", "tokens_per_second": 110.0, "tpot_p50_ms": 8.0}
    measure.show([plain, ours, {"case": "reads", "method": "kascade", "read_of_dense": 0.2}], "kascade")
    assert capsys.readouterr().out.splitlines() == [
        "load kascade batch 32: tokens_per_second 110.000  1.100x of FLASH_ATTN (to reach: 1.0x)",
        "load kascade batch 32: tpot_p50_ms 8.000  1.500x of FLASH_ATTN",
        "load kascade batch 32: gap_p99_ms 40.000  1.000x of FLASH_ATTN",
    ]


def test_compiled_kernels_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of longreach, since the last call; another hook is called as before."""
    knobs, measure, seen = pytest.importorskip("triton").knobs, script("measure"), list[str]()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *, fn, **facts: seen.append(fn.name))
    worker = SimpleNamespace()
    assert measure.compilations(worker) == []
    for module, name in (("longreach.ops.attend", "attend_pieces"), ("vllm.v1", "sample"), ("longreach.ops", "score")):
        knobs.runtime.jit_post_compile_hook(key="", repr="", fn=SimpleNamespace(module=module, name=name))
    assert measure.compilations(worker) == ["attend_pieces", "score"] and measure.compilations(worker) == []
    assert seen == ["attend_pieces", "sample", "score"]
    one = {"case": "ttft", "method": "kascade", "batch": 1, "ttft_ms": 9.0, "kernels_compiled": {"score": 2, "sum": 1}}
    measure.show([one], "kascade")
    assert capsys.readouterr().out.splitlines()[1] == "ttft kascade batch 1: compiled 3 of longreach's kernels"


def test_prompts_share_their_beginnings_and_no_two_are_alike() -> None:
    measure = script("measure")
    few, more = measure.prompts(2, 40), measure.prompts(3, 100)
    ids = [one["prompt_token_ids"] for one in more]
    assert [one["prompt_token_ids"] for one in few] == [each[:40] for each in ids[:2]]
    assert [len(each) for each in ids] == [100] * 3 and len({tuple(each) for each in ids}) == 3


def test_the_model_has_a_plan_of_its_depth(tmp_path: Path) -> None:
    script("measure").make_model(tmp_path, 4)
    values = json.loads((tmp_path / "plan.json").read_text())["values"]
    assert values["anchors"] == [0, 2] and len(values["head_map"]) == 4


def test_a_file_with_lines_is_not_added_to_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "lines.json"
    out.write_text("")
    monkeypatch.setattr("sys.argv", ["measure.py", "tpot-8k", "--out", str(out)])
    with pytest.raises(SystemExit):
        script("measure").main()


def test_scores_that_are_all_equal_have_an_interval() -> None:
    compare = script("quality").compare
    found = compare({"a": [1.0] * 20}, {"a": [1.0] * 19 + [0.0]})
    assert found.loop == 1.0 and found.vllm == 0.95 and abs(found.vllm - found.loop) < found.half < 0.2
    found = compare({"a": [1.0, 0.0] * 10}, {"a": [1.0] * 20})
    assert found.loop == 0.5 and 0.2 < found.half < 0.25 and not found.agree


def test_a_loss_on_the_same_prompts_is_found_within_the_interval_of_the_loop() -> None:
    """Scores of many tasks vary by more than the loss of three points."""
    loop = [1.0] * 150 + [0.0] * 50
    lost = script("quality").compare({"a": loop}, {"a": [0.0] * 6 + loop[6:]})
    assert abs(lost.vllm - lost.loop) < lost.half and lost.difference == -0.03 and not lost.agree
    few = script("quality").compare({"a": loop}, {"a": [0.0] * 3 + loop[3:]})
    assert few.agree
    both = script("quality").compare({"a": loop}, {"a": [0.0] * 6 + loop[6:-6] + [1.0] * 6})
    assert both.agree and both.difference == 0


def scored(monkeypatch: pytest.MonkeyPatch, out: Path, failing: str = "") -> tuple[int, list[str]]:
    """Run quality.py on two GPUs with made-up scores: (exit code, what it measured)."""
    quality, asked = script("quality"), list[str]()

    def measure_part(part: str, methods: list[str], given: Any, gpus: Any) -> Any:
        asked.append(f"{part} {'+'.join(methods)}")
        if failing in methods and part == "vllm":
            raise RuntimeError("no memory")
        scores = {"512": {"niah": [1.0, 0.0]}}
        return dict.fromkeys(methods, scores) if part == "loop" else scores

    monkeypatch.setattr(quality, "measure_part", measure_part)
    monkeypatch.setattr(quality, "vllm_version", lambda: "1")
    monkeypatch.setenv("LONGREACH_COMMIT", "abc")
    command = ["--lengths", "512", "--samples", "2", "--methods", "dense", "quest", "loki", "--gpus", "0", "1"]
    monkeypatch.setattr("sys.argv", ["quality.py", *command, "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        quality.main()
    return int(ended.value.code or 0), asked


def test_a_record_of_scores_is_continued_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    code, asked = scored(monkeypatch, out, failing="quest")
    assert code == 1 and sorted(asked) == ["loop dense+loki", "loop quest", "vllm dense", "vllm loki", "vllm quest"]
    assert "vllm quest: failed\nno memory" in capsys.readouterr().out
    code, asked = scored(monkeypatch, out)
    assert code == 0 and asked == ["vllm quest"]
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "512 dense",
        "512 loki",
        "512 quest",
    ]
    kept = json.loads(out.read_text())
    assert kept["versions"]["vllm"] == "1" and list(kept["vllm"]) == ["dense", "loki", "quest"]
    out.write_text(json.dumps(kept | {"commit": "def"}))
    code, asked = scored(monkeypatch, out)
    assert code == 2 and not asked and "has other commit than this run" in capsys.readouterr().err


FACTS = {
    "commit": "abc", "dirty": False, "device": {"name": "abacus"}, "python": "3", "layers": 32, "ranks": 1,
    "versions": {"vllm": "1"}, "start_seconds": 9.0, "allocations_since_start": [1], "options": {"max_num_seqs": 8},
}  # fmt: skip
PLAIN = lines("FLASH_ATTN", 9.0, 20.0, 28.0, 6)


def run(lines: list[dict[str, Any]], started_at: float, **facts: Any) -> list[dict[str, Any]]:
    """What an engine writes."""
    return [FACTS | line | {"started_at": started_at} | facts for line in lines]


def test_a_record_has_targets_and_engines() -> None:
    reads = {"case": "reads", "method": "kascade", "read_of_dense": 0.2}
    ours = run([*lines("kascade", 6.0, 12.5, 14.0, 5), reads], 2.0, allocations_since_start=[3])
    made = script("record").record(run(PLAIN, 1.0) + ours)
    assert made["commit"] == "abc" and made["device"]["name"] == "abacus" and list(made["cases"]) == ["tpot-128k"]
    assert [(one["of"], round(one["got"], 3), one["reached"]) for one in made["cases"]["tpot-128k"]["targets"]] == [
        ("kascade, batch 1", 1.5, True),
        ("kascade, batch 4", 1.6, False),
        ("kascade, batch as many as fit", 1.667, False),
    ]
    engines = [(one["method"], one.get("read_of_dense"), one["allocations_since_start"]) for one in made["engines"]]
    assert engines == [("FLASH_ATTN", None, [1]), ("kascade", 0.2, [3])]
    assert made["cases"]["tpot-128k"]["measurements"][0] == {
        "batch": 1, "fits": False, "method": "FLASH_ATTN", "tpot_ms": 9.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"commit": "def"}, r"differ in commit \['\"abc\"', '\"def\"'\]"),
        ({"versions": {"vllm": "2"}}, "differ in versions"),
        ({"device": {"name": "slide rule"}}, "differ in GPU"),
        ({"options": {"max_num_seqs": 9}}, "kascade and FLASH_ATTN differ in max_num_seqs"),
    ],
)
def test_what_was_measured_differently_makes_no_record(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        script("record").record(run(PLAIN, 1.0) + run(lines("kascade", 6.0, 12.5, 14.0, 5), 2.0, **facts))


def test_a_method_may_have_several_engines() -> None:
    """Each writes how much it read, in a line of its own."""
    reads = {"case": "reads", "method": "kascade"}
    first = run([*lines("kascade", 6.0, 12.5, 14.0, 5)[:2], reads | {"read_of_dense": 0.2}], 2.0)
    second = run([*lines("kascade", 6.0, 12.5, 14.0, 5)[2:], reads | {"read_of_dense": 0.3}], 3.0)
    made = script("record").record(run(PLAIN, 1.0) + first + second)
    assert [one.get("read_of_dense") for one in made["engines"]] == [None, 0.2, 0.3]
    assert len(made["cases"]["tpot-128k"]["targets"]) == 3


def test_a_measurement_is_in_a_record_once() -> None:
    with pytest.raises(InvalidInput, match="there twice: tpot-128k of FLASH_ATTN with batch 1, "):
        script("record").record(run(PLAIN, 1.0) + run(PLAIN, 2.0))


class Clock:
    """Time that passes when told."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ScriptedEngine:
    """vLLM's engine: each step takes some seconds, and gives each named request one token more."""

    def __init__(self, clock: Clock, steps: list[tuple[float, str]]):
        self.clock, self.steps, self.names, self.tokens = clock, steps, list[str](), dict[str, int]()
        self.sent = list[float]()

    def add_request(self, name: str, ids: Any, sampling: Any) -> None:
        self.names.append(name)
        self.sent.append(self.clock.now - Clock.now)
        self.tokens[name] = 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.steps and self.names)

    def step(self) -> list[Any]:
        seconds, who = self.steps.pop(0)
        self.clock.now += seconds
        found = []
        for number in map(int, who):
            name = self.names[number]
            self.tokens[name] += 1
            found.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * self.tokens[name])]))
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: given))
    return Clock()


def test_only_steps_in_which_all_requests_decode_are_timed(clock: Clock) -> None:
    """The first call fills the engine's queue; one request decodes while another is read; one is read again."""
    measure = script("measure")
    measure.time = clock
    steps = [(0.5, ""), (1, "0"), (2, "0"), (3, "01"), (0.25, "01"), (0.125, ""), (0.25, "01"), (4, "1"), (0.5, "01")]
    llm = SimpleNamespace(llm_engine=ScriptedEngine(clock, steps))
    read, times = measure.step_times(llm, measure.prompts(2, 8), 9)
    assert read == 6.5 and times == [0.25, 0.375, 0.5]


def test_requests_of_a_load_arrive_evenly(clock: Clock) -> None:
    measure = script("measure")
    measure.time = clock
    case = replace(measure.CASES["load"], context=8, arrival_seconds=10)
    engine = ScriptedEngine(clock, [(1, "0"), (1, "0"), (4, "0"), (2, "01"), (2, "1")])
    found = measure.load(SimpleNamespace(llm_engine=engine), case, 2)
    # the second one is to arrive after 5 s, and is sent once the step that is under way ends, after 6 s
    assert engine.sent == [0.0, 6.0] and found["seconds"] == 10 and found["gap_p50_ms"] == 2000
    assert found["gap_p99_ms"] == 4000 and found["tokens_per_second"] == 51.2
