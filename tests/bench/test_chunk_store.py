"""The chunk store's measurement, on tiny chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from longreach.bench import chunk_store
from longreach.errors import InvalidInput, MeasurementFailed


def test_chunks_that_differ_end_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = chunk_store._opened
    monkeypatch.setattr(chunk_store, "_opened", lambda file: [x * 0 for x in real(file)])
    with pytest.raises(MeasurementFailed, match="other bytes"):
        chunk_store.run(chunk_store.TINY, tmp_path, lambda *_: None, lambda _: None)
    assert [p.name for p in tmp_path.iterdir()] == ["chunk-store.json"]


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no room"):
        chunk_store.run(chunk_store.Load(chunks=10**9), tmp_path, lambda *_: None, lambda _: None)


def test_where_pages_stay_nothing_cold_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_store, "drop_pages", lambda file: False)
    results = chunk_store.run(chunk_store.TINY, tmp_path, lambda *_: None, lambda _: None)
    assert results["get-cold"]["dropped"] == 0 and results["get-cold"]["targets"] == []
