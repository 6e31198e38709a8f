"""What is timed did what it says: all chunks computed, found again, listed and whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longreach.bench import store_verbs
from longreach.bench.store_verbs import main
from longreach.records.sources import source_hash
from longreach.records.stale import stale
from longreach.tasks.haystack import paragraphs


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(store_verbs, "paragraphs", lambda: list(paragraphs())[:40])
    command = ["--chunks", "3", "--chunk-tokens", "24", "--folder", str(tmp_path / "s")]
    main([*command, "--output", str(tmp_path / "r.json")])
    record = json.loads((tmp_path / "r.json").read_text())
    assert [record[k] for k in ("computed", "stored_again", "listed", "whole", "broken")] == [3, 3, 3, 3, 0]
    assert record["bytes"] == sum(f.stat().st_size for f in (tmp_path / "s").glob("*.safetensors"))
    assert 3 <= record["tokens"] <= 72 and record["commit"] and record["device"]["type"] in ("cpu", "cuda")
    assert record["sources"] == {name: source_hash(name) for name in ("precompute", "chunk_store")}
    assert set(record["seconds"]) >= {"fingerprint", "split", "add", "add again", "list", "verify"}
    assert set(record["load_average_after"]) == set(record["seconds"])
    assert set(record["seconds_a_chunk"]) == {"add", "add again", "compute", "prefill of the model by itself"}
    assert all(0 < x["first_quartile"] <= x["median"] for x in record["seconds_a_chunk"].values())
    assert all(seconds > 0 for seconds in record["seconds"].values())
    others = tmp_path / "others"
    others.mkdir()
    for sha256 in (record["model"]["sha256"], "0" * 64):
        named = {**record, "dirty": False, "model": {**record["model"], "sha256": sha256}}
        (others / f"{sha256}.json").write_text(json.dumps(named))
    (fault,) = stale(others)
    assert fault.path.stem == "0" * 64 and "other weights than those of longreach-mini" in fault.why
    with pytest.raises(SystemExit, match="holds chunks already"):
        main([*command, "--output", str(tmp_path / "r.json")])
