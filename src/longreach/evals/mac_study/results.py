"""The numbers of MAC-Attention's figures, from the prompts' data. Lists by layer have the layers of full attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longreach.evals.calibration.gather import unpacked
from longreach.evals.mac_study.gather import StudySettings, layers_of
from longreach.evals.mac_study.head_gap_spread import head_gap_spread
from longreach.evals.mac_study.matching import WAYS, Way
from longreach.evals.mac_study.sweeps import Point, Samples, at_acceptance, at_skipped, below, layer_by_layer, point
from longreach.methods.call import ModelShape
from longreach.methods.mac.plan import SCALES, MACPlan, Scale
from longreach.methods.mac.policy import limit_of

TAUS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
ACCEPTANCES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
SKIPPED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class StudyData:
    """The data of all prompts, for the layers of full attention. Rows S are those of all prompts."""

    def __init__(self, what: StudySettings, plan: MACPlan, shape: ModelShape, parts: Sequence[Mapping[str, Any]]):
        self.what, self.plan, self.shape = what, plan, shape
        self.layers = layers_of(parts)
        self.pos = torch.tensor([row for part in parts for row in part["rows"]])
        self.distance, self.gap, self.error = (self._joined(parts, x) for x in ("distance", "gap", "error"))
        self.mass = torch.stack([unpacked(part["mass"]) for part in parts]).mean(0)[self.layers]

    def _joined(self, parts: Sequence[Mapping[str, Any]], name: str) -> dict[Way, Tensor]:
        """[L, windows, S, H, ...] of each way."""
        return {way: torch.cat([unpacked(p[name][way])[self.layers] for p in parts], 2) for way in WAYS}

    def samples(self, way: Way, window: int = -1, band: int | None = None) -> Samples:
        """[L, S, H] with the nearest row of a window (its place, -1: the widest) and a band (default: `what.band`)."""
        band = self.what.band if band is None else band
        count, bands = self.what.errors_of(way)
        place = window if window < 0 else window - len(self.distance[way][0])
        error = self.error[way][:, place, ..., bands.index(band)] if -place <= count else None
        distance = self.distance[way][:, place]
        return Samples(distance, torch.zeros_like(distance) if error is None else error, self.skipped(way, place, band))

    def skipped(self, way: Way, window: int, band: int) -> Tensor:
        """[L, S, H]: keys of the entry over all visible to the row; (p - r)+ / m where no sinks are kept out."""
        keys = self.pos[:, None] - self.gap[way][:, window] + 1 - band - self.what.sinks
        return torch.where(self.gap[way][:, window] >= 0, keys.clamp(min=0), 0) / (self.pos[:, None] + 1)

    def grouped(self, accepted: Tensor) -> Tensor:
        """bool like accepted [..., H]: the query heads of a KV head reuse together or not at all."""
        group = self.shape.query_heads // self.shape.kv_heads
        return accepted.unflatten(-1, (-1, group)).all(-1).repeat_interleave(group, -1)

    def taus(self, scale: Scale) -> Tensor:
        """[L, 1, 1]: the plan's thresholds, as squared distances."""
        dim = self.shape.head_dim
        limits = [limit_of(scale, self.plan.tau[scale][n], dim) for n in self.layers]
        return torch.tensor(limits, dtype=torch.float64)[:, None, None]


def results(found: StudyData, tau: float) -> dict[str, Any]:
    """All results. tau: the threshold, in sqrt(2 d), of those at a single one."""
    what, dim = found.what, found.shape.head_dim
    paper = limit_of("sqrt2d", tau, dim)
    limits: dict[Scale, float | Tensor] = {"sqrt2d": paper, "calibrated": found.taus("calibrated")}
    return {
        "rows": len(found.pos), "layers": found.layers, "windows": list(what.windows), "bands": list(what.bands),
        "band": what.band, "sinks": what.sinks, "tau": tau, "taus": list(TAUS),
        "thresholds": {scale: _thresholds(found, scale) for scale in SCALES},
        "window": {scale: _windows(found, scale, limits[scale]) for scale in SCALES},
        "band_mass": found.mass.tolist(),
        "gap_band": _gap_band(found, paper),
        "window_band": _window_band(found, paper),
        "band_tau": {scale: _band_tau(found, scale) for scale in SCALES},
        "skew": {scale: head_gap_spread(found.gap[scale][:, -1], below(found.samples(scale), limits[scale]),
                             found.shape.query_heads // found.shape.kv_heads) for scale in SCALES},
        "equal_acceptance": {way: _equal_acceptance(found, way) for way in WAYS},
        "equal_skipped": {
            "shares": list(SKIPPED), **{way: _listed(at_skipped(found.samples(way), SKIPPED)) for way in WAYS}
        },
        "plan": {scale: point(s := found.samples(scale), below(s, found.taus(scale)))._asdict() for scale in SCALES},
    }  # fmt: skip


def _thresholds(found: StudyData, scale: Scale) -> dict[str, Any]:
    """By TAUS in the widest window: of all samples, layer by layer, head by head; reuse is under the group rule."""
    samples = found.samples(scale)
    rows: dict[str, list[Any]] = {name: [] for name in ("all", "layers", "heads", "reuse", "skipped_reuse")}
    for tau in TAUS:
        ok = below(samples, limit_of(scale, tau, found.shape.head_dim))
        rows["all"].append(point(samples, ok))
        rows["layers"].append([point(Samples(*x), y) for *x, y in zip(*samples, ok, strict=True)])
        rows["heads"].append(ok.double().mean(1).tolist())
        together = found.grouped(ok)
        rows["reuse"].append(together.double().mean((1, 2)).tolist())
        rows["skipped_reuse"].append((samples.skipped * together).mean((1, 2), dtype=torch.float64).tolist())
    return {
        "all": _listed(rows["all"]),
        "layers": [_listed(points) for points in zip(*rows["layers"], strict=True)],
        **{f"{name}_{by}": [list(x) for x in zip(*rows[name], strict=True)]
           for name, by in (("heads", "acceptance"), ("reuse", "layers"), ("skipped_reuse", "layers"))},
    }  # fmt: skip


def _windows(found: StudyData, scale: Scale, limit: float | Tensor) -> dict[str, Any]:
    """Acceptance and skipped share [L][windows]; reused [L]: matches left by the group rule in the widest."""
    accepted, skipped = [], []
    for place in range(len(found.what.windows)):
        samples = found.samples(scale, place)
        ok = below(samples, limit)
        accepted.append(ok.double().mean((1, 2)))
        skipped.append((samples.skipped * ok).mean((1, 2), dtype=torch.float64))
    return {
        "acceptance": torch.stack(accepted, 1).tolist(),
        "skipped": torch.stack(skipped, 1).tolist(),
        "reused": found.grouped(ok).double().mean((1, 2)).tolist(),
    }


def _gap_band(found: StudyData, limit: float) -> dict[str, Any]:
    """Error of those accepted by gap (from edges[i] to edges[i + 1] - 1) and band: [L][bands][bins], None for none."""
    gap, ok = found.gap["sqrt2d"][:, -1], below(found.samples("sqrt2d"), limit)
    edges = [1]
    while edges[-1] <= found.what.window:
        edges.append(2 * edges[-1])
    inside = [ok & (gap >= a) & (gap < b) for a, b in pairwise(edges)]
    count = torch.stack([x.sum((1, 2)) for x in inside], 1)
    error = found.error["sqrt2d"][:, -1].double()  # [L, S, H, bands]
    sums = torch.stack([(error * x[..., None]).sum((1, 2)) for x in inside], -1)  # [L, bands, bins]
    means = (sums / count[:, None].clamp(min=1)).tolist()
    counts = count.tolist()
    shown = [
        [[x if n else None for x, n in zip(row, counts[layer], strict=True)] for row in rows]
        for layer, rows in enumerate(means)
    ]
    return {"edges": edges, "error": shown, "count": counts}


def _window_band(found: StudyData, limit: float) -> dict[str, Any]:
    """[bands][windows]: error over all rows, error of those that reuse, and the share of keys that is read."""
    grid = [[point(s := found.samples("sqrt2d", w, band), below(s, limit)) for w in range(len(found.what.windows))]
            for band in found.what.bands]  # fmt: skip
    return {
        "error": [[p.error for p in row] for row in grid],
        "error_reused": [[p.error_reused for p in row] for row in grid],
        "read": [[1 - p.skipped for p in row] for row in grid],
        "acceptance": [p.accepted for p in grid[0]],
    }


def _band_tau(found: StudyData, scale: Scale) -> list[list[dict[str, Any]]]:
    """[bands][taus] points of all samples."""
    limits = [limit_of(scale, tau, found.shape.head_dim) for tau in TAUS]
    every = [found.samples(scale, band=band) for band in found.what.bands]
    return [_listed([point(s, below(s, limit)) for limit in limits]) for s in every]


def _equal_acceptance(found: StudyData, way: Way) -> dict[str, Any]:
    """one: a threshold for all layers, as the paper has it; own: one for each layer."""
    samples = found.samples(way)
    return {
        "shares": list(ACCEPTANCES),
        "one": _listed(at_acceptance(samples, ACCEPTANCES)),
        "own": _listed(layer_by_layer(samples, ACCEPTANCES)),
    }


def _listed(points: Sequence[Point | None]) -> list[Any]:
    return [None if p is None else p._asdict() for p in points]
