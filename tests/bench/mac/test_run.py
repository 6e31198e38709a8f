"""A case of MAC: its record, the sweeps that cases share, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.bench import sweep
from longreach.bench.cases import CASES, tiny
from longreach.bench.inputs import bytes_needed
from longreach.bench.mac import run
from longreach.bench.run import run_case
from longreach.bench.sweep import Sweeps
from longreach.cache.ring import RowRing
from longreach.errors import InvalidInput, OutOfMemory

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WITHOUT = "flashinfer", "flash_attention_3"


def measured(name: str, sweeps: Sweeps | None = None) -> dict[str, Any]:
    return run_case(tiny(CASES[name]), CPU, without=WITHOUT, replays=2, sweeps=sweeps)


def test_a_record_says_what_was_forced() -> None:
    result = measured("mac-hit-128k-b8")
    names = [(e["name"], e["who"]) for e in result["entries"]]
    ours = [("gap 350", "longreach"), ("gap 64", "longreach"), ("gap 1024", "longreach"), ("dense", "longreach")]
    assert names[:4] == ours and names[4][1] == "torch_sdpa"
    assert result["forced"].startswith("Hits are forced") and result["baselines"]["left_out"] == sorted(WITHOUT)
    entry = result["entries"][0]
    assert entry["settings"]["forced"]["heads_that_hit"] == 1 and entry["settings"]["forced"]["gap"] == 20
    kv, shape = 2 * 16 * 4, tiny(CASES["mac-hit-128k-b8"]).shape  # bytes of a key and its value
    assert entry["bytes_read"] > shape.batch * shape.kv_heads * 36 * kv
    ring = 4 * 72 * (2 * 16 * 4 + 4 + 2) + 72 * 4 + 2 * 72 * 4 + 2 * 4  # queries, entries, depths; stamps; accounts
    assert entry["ring_percent_of_kv"] == pytest.approx(100 * ring / (256 * 2 * kv))
    assert all(0 <= e["error"] <= result["error_bound"] for e in result["entries"])
    assert result["break_even"] == {}
    speeds, fastest = result["speed_over_fastest"], result["entries"][-1]
    assert speeds["kernel"] == fastest["name"] and list(speeds["ratios"]) == [name for name, _ in ours]
    assert (
        speeds["ratios"]["dense"] == fastest["microseconds"]["median"] / result["entries"][3]["microseconds"]["median"]
    )


def test_rates_have_a_break_even() -> None:
    times = {"rate 0, guard": 9, "rate 0": 12, "rate 0.5, guard": 8, "rate 0.5": 10, "dense": 9, "A": 7}
    for rate, guarded, free in ((0.3, 8.4, 10.8), (0.6, 7.5, 9), (0.7, 7, 8), (0.8, 6.5, 7)):  # on the lines between
        times |= {f"rate {rate:g}, guard": guarded, f"rate {rate:g}": free}
    for rate, us in ((0.9, 6), (0.97, 4), (0.99, 3), (1, 2)):
        times |= {f"rate {rate:g}, guard": us, f"rate {rate:g}": us}
    entries = [
        {"name": name, "who": "flashinfer" if name == "A" else "longreach", "microseconds": {"median": us}}
        for name, us in times.items()
    ]
    reuse = CASES["mac-rates-128k-b1"].reuse
    assert reuse is not None
    found = run.break_evens(reuse, entries, 1)
    assert found["guard"] == {"dense": 0.0, "fastest other kernel": pytest.approx(0.7)}
    assert found["no guard"] == {"dense": pytest.approx(0.6), "fastest other kernel": pytest.approx(0.8)}


def test_cases_of_a_shape_share_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = sweep.best
    monkeypatch.setattr(sweep, "best", lambda name, inputs, say: asked.append(inputs.shape) or real(name, inputs, say))
    sweeps = Sweeps()
    first, second = (measured(name, sweeps) for name in ("mac-hit-128k-b1", "mac-table-120k-b1"))
    assert len(asked) == 1 and first["baselines"]["tried"] == second["baselines"]["tried"]
    assert first["entries"][-1]["name"] == second["entries"][-1]["name"]
    measured("mac-hit-128k-b8", sweeps)
    assert len(asked) == 2


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["mac-share-256k-b32"]
    monkeypatch.setattr(run, "copies_needed", lambda read, device: 1)
    free = [bytes_needed(case) + (16 << 30)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 0))
    run.check_room(case, GPU)
    free[0] = bytes_needed(case)
    with pytest.raises(OutOfMemory, match=r"mac-share-256k-b32.* the GPU has 32 left"):
        run.check_room(case, GPU)


def test_rings_are_counted_among_what_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    case, copies = CASES["mac-table-32k-b1"], 5
    assert case.reuse is not None and len(case.reuse.hits) == 4
    shape = case.shape
    like = torch.empty(0, dtype=torch.bfloat16)
    ring = RowRing(1, shape.heads, shape.kv_heads, shape.dim, case.reuse.window, like).bytes_per_sequence
    kv = run.RESERVED + copies * bytes_needed(case)
    monkeypatch.setattr(run, "copies_needed", lambda read, device: copies)
    for rings, fits in ((1.05, True), (0.9, False)):
        free = kv + int(rings * copies * 4 * shape.batch * ring)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 0))
        if fits:
            run.check_room(case, GPU)
        else:
            with pytest.raises(OutOfMemory, match="keys, values and rings take"):
                run.check_room(case, GPU)


def test_several_rows_are_refused() -> None:
    with pytest.raises(InvalidInput, match="--rows 2"):
        run_case(tiny(CASES["mac-hit-128k-b1"]).but(rows=2), CPU, without=WITHOUT)
