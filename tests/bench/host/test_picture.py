"""The picture of tokens per second by the number of sequences."""

from __future__ import annotations

from pathlib import Path

from longreach.bench.host import picture
from longreach.bench.record import add


def test_a_curve_for_each_method_and_way(tmp_path: Path) -> None:
    speeds = {
        ("dense", 1): 5.0, ("magicpig, batch 1", 1): 90.0, ("magicpig on the CPU, batch 1", 1): 60.0,
        ("magicpig, batch 4", 4): 120.0, ("magicpig on the CPU, batch 4", 4): 80.0, ("magicpig, batch 2", 2): 110.0,
    }  # fmt: skip
    entries = [{"name": name, "batch": batch, "tokens_per_second": x} for (name, batch), x in speeds.items()]
    add(tmp_path / "host.json", "host", picture.CASE, {"entries": entries})
    found = {s.label: (s.x, s.y) for s in picture.drawn(tmp_path)}
    assert found == {
        "dense": ((1,), (5.0,)),
        "magicpig": ((1, 2, 4), (90.0, 110.0, 120.0)),
        "magicpig on the CPU": ((1, 4), (60.0, 80.0)),
    }
    assert [s.number for s in picture.drawn(tmp_path)] == [0, 1, 2]


def test_without_the_record(tmp_path: Path) -> None:
    assert picture.drawn(tmp_path) == [] and picture.picture(tmp_path) is None
    add(tmp_path / "host.json", "host", "host-96k-b1", {"entries": []})
    assert picture.picture(tmp_path) is None
