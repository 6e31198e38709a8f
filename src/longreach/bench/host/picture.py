"""Picture of the record `host`: tokens per second by the number of sequences."""

from __future__ import annotations

from pathlib import Path

from longreach.bench.case import HOST
from longreach.bench.host.cases import DENSE
from longreach.bench.record import read
from longreach.records.report.plots.lines import CurvePanel, Series, curves

CASE = "host-96k-batches"


def drawn(results: Path) -> list[Series]:
    """A curve for each method and way to attend; dense attention is one point. [] without the record."""
    path = results / f"{HOST}.json"
    entries = read(path)["cases"].get(CASE, {}).get("entries", []) if path.is_file() else []
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        label = entry["name"].removesuffix(f", batch {entry['batch']}")
        found.setdefault(label, []).append((entry["batch"], entry["tokens_per_second"]))
    series = list[Series]()
    for number, (label, points) in enumerate(found.items()):
        x, y = zip(*sorted(points), strict=True)
        series.append(Series(label, number, label == DENSE, x, y, plain=True))
    return series


def picture(results: Path) -> bytes | None:
    """PNG, as the paper's Figure 7. None without the record; raises Unsupported without matplotlib."""
    series = drawn(results)
    if not series:
        return None
    panel = CurvePanel("8B shape, 96K keys in host memory", "sequences", "tokens per second", tuple(series),
                       doubling=True)  # fmt: skip
    return curves([panel])
