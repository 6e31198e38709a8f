"""Cases of MKA run at a small size, are right before they have a time, and hold what their targets need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.bench.cases import CASES, GROUPS, SPOTS, tiny
from longreach.bench.check import WrongResult
from longreach.bench.inputs import Inputs
from longreach.bench.mka import attention, decode
from longreach.bench.mka.training import Trial, measure_training
from longreach.bench.run import run_case
from longreach.bench.runner import Runner
from longreach.bench.targets import judge
from longreach.ops import Partial

CPU = torch.device("cpu")
WITHOUT = "flashinfer", "flash_attention_3"
NAMES = {
    "mka-attention-16k": ["block_mka", "torch math"],
    "mka-layer-32k": ["gqa", "fastmka", "block_mka", "mla", "mka softmaxes", "mka gated"],
    "mka-scan-128k": ["forward", "backward"],
    "mka-decode-128k-b8": ["block_mka", "torch SDPA math"],
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return {name: run_case(tiny(CASES[name]), CPU, without=WITHOUT, replays=2) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_entries(name: str, results: dict[str, dict[str, Any]]) -> None:
    entries = results[name]["entries"]
    assert [entry["name"] for entry in entries] == NAMES[name]
    assert all(entry["microseconds"]["median"] > 0 for entry in entries)
    assert all(entry["launched"] is not None for entry in entries if entry["who"] == "longreach")
    if "attention" in name or "layer" in name:
        assert all(len(entry["forward_microseconds"]["replays"]) == 2 for entry in entries)
        assert all(entry["backward_microseconds"]["median"] > 0 for entry in entries)
    if "decode" in name:
        assert 0 < entries[0]["percent_of_dense"] < 100 and entries[0]["error"] < 1e-4


def test_targets() -> None:
    bounds = {name: [(t.of, t.over, t.quantity, t.bound) for t in case.targets] for name, case in CASES.items()}
    speed = {16: 1.4, 32: 2.5, 64: 4.5, 128: 7.0}
    for context, least in speed.items():
        assert bounds[f"mka-attention-{context}k"] == [("block_mka", "torch_sdpa", "speed over", least)]
    assert bounds["mka-attention-4k"] == bounds["mka-attention-8k"] == []
    assert bounds["mka-decode-128k-b32"][0][3] == 20.0 and bounds["mka-decode-128k-b1"][1][3] == 2.6
    assert set(SPOTS) == set(GROUPS) and {"mka-attention", "mka-layer", "mka-scan", "mka-decode"} <= set(GROUPS)


@pytest.mark.parametrize("name", ["mka-attention-4k", "mka-decode-128k-b1"])
def test_wrong_results_have_no_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = attention if "attention" in name else decode
    right = module.block_attention

    def wrong(*args: Any, **given: Any) -> Partial:
        found = right(*args, **given)
        return found if given.get("impl") == "reference" and given else Partial(found.out * 1.01, found.lse)

    monkeypatch.setattr(module, "block_attention", wrong)
    monkeypatch.setattr(decode, "KVView", decode.KVView)
    case = tiny(CASES[name])
    if "decode" in name:
        with pytest.raises(WrongResult, match="block_mka: relative error"):
            decode.BlockStep(Inputs(case, CPU), "auto").check()
    else:
        with pytest.raises(WrongResult, match="block_mka: relative error"):
            attention.BlockAttention(case, CPU, 0).check()


def test_training_is_timed_in_turns_and_leaves_no_gradients() -> None:
    x, calls = torch.randn(5, requires_grad=True), list[str]()

    def forward(name: str) -> Any:
        def run() -> torch.Tensor:
            calls.append(name)
            return (2 * x).square()

        return run

    found = measure_training({n: Trial(forward(n), (x,)) for n in ("a", "b")}, CPU, replays=3, warm_up=1)
    assert calls[2:10] == ["a", "b", "b", "a", "a", "b", "b", "a"] and x.grad is None
    both = found["a"]
    assert both.peak is None and both.both.replays == 3
    assert both.both.median == pytest.approx(both.forward.median + both.backward.median, rel=0.9)


def test_a_model_converted_to_fastmka() -> None:
    saved = list[int]()
    runner = Runner(CPU, without=WITHOUT, quick=True, say=lambda line: None)
    result = runner.run(tiny(CASES["mka-8b-32k-b1"]), 0, lambda part: saved.append(len(part["entries"])))
    assert [entry["name"] for entry in result["entries"]] == ["gqa", "fastmka"] and saved == [1, 2]
    assert all(entry["error"] < 1e-4 for entry in result["entries"])
    (target,) = judge(CASES["mka-8b-32k-b1"], result["entries"])
    assert target["quantity"] == "speed over" and target["got"] > 0
