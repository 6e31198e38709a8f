"""longreach bench run chunk-store, on tiny chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from longreach.bench.record import read
from longreach.records.stale import faults


def test_the_record_says_what_was_stored_and_what_became_of_targets(longreach: Callable, tmp_path: Path) -> None:
    code, out, err = longreach("bench", "run", "chunk-store", "--tiny", "--out", tmp_path)
    assert (code, err) == (0, "") and "put: time over safetensors save_file, fsync, rename <= 1.2" in out
    cases = read(tmp_path / "chunk-store.json")["cases"]
    assert list(cases) == ["put", "get-warm", "get-cold", "verify-and-list"]
    for case in cases.values():
        assert {"commit", "dirty", "versions", "device", "sources", "load", "filesystem"} <= set(case)
        assert case["load"]["bytes"] == 2 * 2 * 8 * 4 * 128 * 2 and "safetensors" in case["versions"]
        assert all("dirty tree" in fault or "commit" in fault for fault in faults(case))
    for name in ("put", "get-warm"):
        (target,) = cases[name]["targets"]
        assert target["got"] > 0 and target["reached"] == (target["got"] <= 1.2)
    assert cases["get-warm"]["verification"]["over_get"] > 0 and 0 <= cases["get-cold"]["dropped"] <= 1
    assert set(cases["verify-and-list"]["seconds"]) >= {"verify, cold", "verify, warm", "list"}
    assert [p.name for p in tmp_path.iterdir()] == ["chunk-store.json"]  # the chunks are gone


def test_json_and_refusals(longreach: Callable, tmp_path: Path) -> None:
    code, out, _ = longreach("bench", "run", "chunk-store", "--tiny", "--json", "--out", tmp_path)
    assert code == 0 and set(json.loads(out)) == {"put", "get-warm", "get-cold", "verify-and-list"}
    assert longreach("bench", "run", "chunk-store", "--tiny", "--batch", "2", "--out", tmp_path).code == 2
    assert longreach("bench", "run", "chunk-store", "--tiny").code == 2  # would write into the project's records
