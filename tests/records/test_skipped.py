"""What MAC skips unforced, from evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longreach.records.record import write
from longreach.records.skipped import skipped

PLANNED = "mac tau=None plan=p.json"


def record(length: int, **scores: float) -> dict[str, Any]:
    """Two tasks; scores by tau ("0.45" as _45). Keys read: tau itself, and a tenth more in the second."""
    taus = {"dense": None} | {f"mac tau=0.{n[1:]}": float(f"0.{n[1:]}") for n in scores if n != "dense"}
    methods: dict[str, Any] = {
        label: {"prefill": {"name": "dense"}, "decode": {"name": "mac", "tau": tau} if tau else {"name": "dense"}}
        for label, tau in taus.items()
    }
    methods[PLANNED] = {"prefill": {"name": "dense"}, "decode": {"name": "mac", "tau": None}}
    results = []
    for more in (0.0, 0.1):
        results.append({PLANNED: {"score": 1.0, "decode_reads": {"keys": 0.0}}})
        for label, score in zip(taus, scores.values(), strict=True):
            keys = (taus[label] or 1.0) + more
            results[-1][label] = {"score": score, "decode_reads": {"keys": keys / 2} if taus[label] else None}
    return {"kind": "eval", "config": {"lengths": [length], "length": length}, "model": {"name": "tiny"},
            "methods": methods, "tasks": {str(n): {"results": r} for n, r in enumerate(results)}}  # fmt: skip


def test_the_loosest_threshold_within_a_point_of_dense_at_the_greatest_length(tmp_path: Path) -> None:
    assert skipped(tmp_path) is None
    write(tmp_path / "short.json", record(64, dense=0.9, _45=0.9))
    write(tmp_path / "long.json", record(128, dense=0.9, _45=0.85, _6=0.895, _75=0.9))
    write(tmp_path / "other.json", {"kind": "bench"})
    found = skipped(tmp_path)
    assert found is not None and found[:1] + found[2:] == ("mac tau=0.6", "tiny", 128, "long.json")
    assert found.share == pytest.approx(1 - 0.65)


def test_none_where_all_lose_more(tmp_path: Path) -> None:
    write(tmp_path / "a.json", record(128, dense=0.9, _45=0.85))
    assert skipped(tmp_path) is None
