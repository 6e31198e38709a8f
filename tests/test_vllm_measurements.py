"""What the scripts in benchmarks/vllm print and judge, from made-up measurements. Without vLLM, and without a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
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
    mean, half, other = compare({"a": [1.0] * 20}, {"a": [1.0] * 19 + [0.0]})
    assert mean == 1.0 and other == 0.95 and abs(mean - other) < half < 0.2
    mean, half, _ = compare({"a": [1.0, 0.0] * 10}, {"a": [1.0] * 20})
    assert mean == 0.5 and 0.2 < half < 0.25


FACTS = {
    "commit": "abc", "dirty": False, "gpu": "abacus", "vllm": "1", "torch": "2", "layers": 32, "ranks": 1,
    "start_seconds": 9.0, "allocations_since_start": [1],
}  # fmt: skip


def test_a_record_has_targets_and_engines() -> None:
    found = [*lines("FLASH_ATTN", 9.0, 20.0, 28.0, 6), *lines("kascade", 6.0, 12.5, 14.0, 5)]
    found += [{"case": "reads", "method": "kascade", "read_of_dense": 0.2, "allocations_since_start": [3]}]
    made = script("record").record([FACTS | line for line in found])
    assert made["commit"] == "abc" and made["device"]["name"] == "abacus" and list(made["cases"]) == ["tpot-128k"]
    assert [(one["of"], round(one["got"], 3), one["reached"]) for one in made["cases"]["tpot-128k"]["targets"]] == [
        ("kascade, batch 1", 1.5, True),
        ("kascade, batch 4", 1.6, False),
        ("kascade, batch as many as fit", 1.667, False),
    ]
    assert made["engines"] == [
        {"method": "FLASH_ATTN", "ranks": 1, "start_seconds": 9.0, "allocations_since_start": [1]},
        {
            "method": "kascade", "ranks": 1, "start_seconds": 9.0, "read_of_dense": 0.2, "allocations_since_start": [3],
        },
    ]  # fmt: skip
    assert made["cases"]["tpot-128k"]["measurements"][0] == {
        "batch": 1, "fits": False, "method": "FLASH_ATTN", "tpot_ms": 9.0,
    }  # fmt: skip


def test_lines_of_two_commits_make_no_record() -> None:
    found = [FACTS | line for line in lines("FLASH_ATTN", 9.0, 20.0, 28.0, 6)]
    with pytest.raises(InvalidInput, match=r"differ in commit \['abc', 'def'\]"):
        script("record").record([*found, found[0] | {"commit": "def"}])
