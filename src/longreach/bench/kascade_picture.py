"""Picture of `kascade-prefill` and `kascade-decode`: where the time of a stack of layers goes (Kascade, Figure 8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longreach.bench.case import KASCADE_PREFILL
from longreach.bench.record import read
from longreach.records.report.plots.bars import Bar, BarPanel, bars

PREFILL = {f"{n}K": f"kascade-prefill-{n}k-10pct" for n in (4, 8, 16, 32, 64, 128)}
DECODE = {
    "128K": "kascade-128k-b1", "256K": "kascade-256k-b1", "512K": "kascade-512k-b1", "32 x 128K": "kascade-128k-b32",
}  # fmt: skip
PANELS = ("prefill, 10%", KASCADE_PREFILL, PREFILL), ("decode, 10%", "kascade-decode", DECODE)
PASSES = {  # name in the picture -> an anchor's passes in prefill and decode
    "anchors: scores and log-sums": ("anchor: log-sums", "anchor: scores", "anchor: score"),
    "anchors: pooling and top-k": ("anchor: pool", "anchor: top_k", "anchor: top-k"),
    "anchors: attention": ("anchor: attend",),
}


def drawn(results: Path, record: str, cases: dict[str, str]) -> tuple[Bar, ...]:
    """A bar for each case of a record: shares of the time of the fastest dense kernel in as many layers."""
    path = results / f"{record}.json"
    found = read(path)["cases"] if path.is_file() else {}
    return tuple(Bar(label, _parts(found[name])) for label, name in cases.items() if name in found)


def _parts(case: dict[str, Any]) -> dict[str, float]:
    times = {entry["name"]: entry["microseconds"]["median"] for entry in case["entries"]}
    dense = min(entry["microseconds"]["median"] for entry in case["entries"] if entry["who"] != "longreach")
    layers, anchors = case["stack"]["layers"], len(case["stack"]["anchors"]) - 1
    whole = layers * dense
    parts = {"layer 0": times["layer 0"] / whole}
    for name, passes in PASSES.items():
        parts[name] = anchors * sum(times.get(one, 0.0) for one in passes) / whole
    return {**parts, "reuse layers": (layers - 1 - anchors) * times["reuse layer"] / whole}


def picture(results: Path) -> bytes | None:
    """PNG, None without the records; raises Unsupported without matplotlib."""
    panels = [
        BarPanel(title, "time over dense attention's", found, line=1.0)
        for title, record, cases in (
            ("prefill, 10%", KASCADE_PREFILL, PREFILL),
            ("decode, 10%", "kascade-decode", DECODE),
        )
        if (found := drawn(results, record, cases))
    ]
    return bars(panels) if panels else None
