"""Cases of fused and of evicted prompts, on the CPU: what their records hold. They measure nothing there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.bench.case import PREFILLS, Case, Model, Shape, Target
from longreach.bench.cases import CASES, FUSIONS, tiny
from longreach.bench.decoding import Decoding
from longreach.bench.evict import run_evict
from longreach.bench.fusion import run_fusion
from longreach.bench.targets import judge
from longreach.methods.registry import FUSIONS as REGISTERED


@pytest.fixture
def bench() -> Decoding:
    return Decoding(torch.device("cpu"), without=(), quick=True, seed=0, say=lambda line: None)


def test_a_fused_prompt(bench: Decoding) -> None:
    saved = list[dict[str, Any]]()
    result = run_fusion(bench, tiny(CASES["fusion-4k"]), saved.append)
    names = [entry["name"] for entry in result["entries"]]
    assert names[:2] == list(PREFILLS) and names[2:5] == ["full_reuse", "pie", "legolink"]
    assert set(FUSIONS) == set(REGISTERED) == {name.split()[0] for name in names[2:]}
    assert {"a3 0.05", "a3 0.15", "dependence 0.15"} <= set(names) and len(saved) >= len(names)
    assert result["chunk_tokens"] == 64 and result["chunk_bytes"] == 2 * 2 * 192 * 2 * 16 * 4
    by_name = {entry["name"]: entry for entry in result["entries"]}
    assert by_name[PREFILLS[1]]["error"] <= by_name[PREFILLS[1]]["error_bound"]
    read = by_name["legolink"]["settings"]
    assert read["recomputed"] == 2 * 40 and read["exact"] == 64 and read["computed"] == 64
    assert all(entry["microseconds"]["median"] > 0 for entry in result["entries"])
    assert result["loads"]["bytes"] == result["chunk_bytes"] and 0 <= result["loads"]["dropped"] <= 1
    assert result["loads"]["page_cache_seconds"] > 0 < result["loads"]["disk_seconds"]


def test_ratio_1_gives_the_logits_of_a_prefill(bench: Decoding) -> None:
    """The prompt's first chunk counts as exact, so every method keeps its stored keys and values at any ratio."""
    methods = ("cacheblend", "a3", "a3_deep", "dependence")
    model = Model(layers=4, hidden=64, feed_forward=128, vocabulary=128)
    case = replace(tiny(CASES["fusion-4k"]), model=model, methods=methods, ratios=(0.0, 1.0))
    errors = {e["name"]: e for e in run_fusion(bench, case, lambda result: None)["entries"]}
    for name in methods:
        whole = errors[f"{name} 1"]
        assert whole["settings"]["exact"] == 64 and whole["settings"]["reused"] == 0
        assert whole["error"] <= whole["error_bound"] < 0.1 * errors[f"{name} 0"]["error"]


def test_an_evicted_prompt(bench: Decoding) -> None:
    result = run_evict(bench, tiny(CASES["evict-7k-b16"]), lambda result: None)
    whole, kept = result["entries"]
    assert whole["kv_bytes"] > 2 * kept["kv_bytes"] > 0
    assert kept["settings"]["evict"]["capacity"] == 64 and whole["settings"]["evict"] is None
    assert kept["answer_seconds"]["300"] > kept["answer_seconds"]["10"] > 0
    for entry, share in ((whole, 1), (kept, 64 / 256)):
        assert entry["kv_read"] == share * result["bytes"]["kv"]
        seconds, read = entry["microseconds"]["median"] / 1e6, result["bytes"]["weights"] + entry["kv_read"]
        assert entry["tb_per_s"] * 1e12 * seconds == pytest.approx(read), "the keys that are kept"
        assert entry["share_of_limit"] * result["limit"]["bytes_per_second"] * seconds == pytest.approx(read)
    assert kept["evict_seconds"] > 0 == whole["evict_seconds"]
    nine = 9 * kept["microseconds"]["median"] / 1e6
    assert kept["answer_seconds"]["10"] == pytest.approx(kept["ttft_seconds"] + kept["evict_seconds"] + nine)
    assert whole["error"] <= whole["error_bound"] and kept["error"] <= kept["error_bound"]


def test_their_targets() -> None:
    entries = [{"name": name, "who": "any", "microseconds": {"median": 9.0 + n}} for n, name in enumerate(PREFILLS)]
    mine = {"name": "pie", "who": "longreach", "microseconds": {"median": 3.0}, "kv_percent": 12.5}
    case = Case("it", "fusion", Shape(1, 8), targets=(
        Target("speed over prefill", 4.0, "pie"), Target("% of KV held", 20.0, "pie"),
    ))  # fmt: skip
    speed, held = judge(case, [*entries, mine])
    assert (speed["got"], speed["than"], speed["reached"]) == (3.0, PREFILLS[0], False)
    assert held["got"] == 12.5 and held["reached"]
    assert judge(case, [entries[0], mine])[0]["got"] is None, "not against half of the baselines"
