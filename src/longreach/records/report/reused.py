"""Scores of MAC-Attention in evaluations that sweep its options: Figures 9 and 10 of the paper."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from longreach.records.report.blocks import Block, Figure
from longreach.records.report.plots import CurvePanel, MapPanel, Scale, Series, curves, maps
from longreach.records.report.rows import Group, summary

METHOD = "mac"
FAITHFUL = 0.95  # of dense attention's score; the paper marks such points with stars
LEAST = 3  # thresholds that make a curve


class SweptScore(NamedTuple):
    """score: over dense attention's. keys: read while decoding, over all."""

    score: float
    keys: float


def reused(group: Group, file: str) -> list[Block]:
    """Pictures of scores by threshold, and by band and window, for the options that are swept."""
    if group.dense is None:
        return []
    blocks: list[Block] = []
    for length in group.lengths:
        found = dict(_found(group, length))
        where = f"-{length}" if len(group.lengths) > 1 else ""
        by_tau = {said: points for said, points in _families(group, found, "tau") if len(points) >= LEAST}
        if by_tau:
            blocks.append(Figure(f"{file}-mac-tau{where}.png", _trade(length, by_tau), (
                "MAC-Attention by threshold: mean score over dense attention's, and the keys read while decoding."
            )))  # fmt: skip
        for number, (_, points) in enumerate(_families(group, found, "band", "window"), 1):
            bands, windows = (sorted({key[n] for key in points}) for n in (0, 1))
            if len(bands) > 1 and len(windows) > 1:
                blocks.append(Figure(f"{file}-mac-grid{where}-{number}.png", _grid(length, bands, windows, points), (
                    f"MAC-Attention by band and window: score over the share of keys read, normalised to the best of "
                    f"the grid; * where the score is at least {FAITHFUL:.0%} of dense attention's."
                )))  # fmt: skip
    return blocks


def _found(group: Group, length: int) -> Iterator[tuple[str, SweptScore]]:
    rows = group.at(length)
    whole = summary(rows, group.dense or "", group.dense).score
    for label in group.labels:
        method = group.records[0]["methods"][label]
        one = summary(rows, label, group.dense)
        if method["decode"]["name"] == METHOD and one.decode is not None and whole:
            yield label, SweptScore(one.score / whole, 2 * one.decode["keys"])


def _families(
    group: Group, found: Mapping[str, SweptScore], *options: str
) -> Iterator[tuple[str, dict[tuple[Any, ...], SweptScore]]]:
    """(what they share, {values of the options: what was found}) of methods that differ in these options alone."""
    families: dict[str, dict[tuple[Any, ...], SweptScore]] = {}
    for label, one in found.items():
        method = group.records[0]["methods"][label]
        values = tuple(method["decode"][option] for option in options)
        if None not in values:
            rest = {**method, "decode": {k: v for k, v in method["decode"].items() if k not in options}}
            families.setdefault(json.dumps(rest, sort_keys=True), {})[values] = one
    for said, points in families.items():
        decode = json.loads(said)["decode"]
        yield f"window {decode.get('window')}, band {decode.get('band')}", dict(sorted(points.items()))


def _trade(length: int, families: Mapping[str, Mapping[tuple[Any, ...], SweptScore]]) -> bytes:
    def panel(ylabel: str, name: str) -> CurvePanel:
        lines = tuple(
            Series(said, n + 1, False, tuple(float(tau) for (tau,) in points),
                   tuple(getattr(x, name) for x in points.values()), plain=True)
            for n, (said, points) in enumerate(families.items())
        )  # fmt: skip
        return CurvePanel(f"{length} tokens", "tau", ylabel, lines, share=name == "keys")

    return curves([panel("score over dense's", "score"), panel("keys read", "keys")])


def _grid(length: int, bands: list[int], windows: list[int], points: Mapping[tuple[Any, ...], SweptScore]) -> bytes:
    cells = [[points.get((band, window)) for window in windows] for band in bands]
    worth = [[None if x is None or not x.keys else x.score / x.keys for x in row] for row in cells]
    most = max((v for row in worth for v in row if v is not None), default=1.0)
    shown = tuple(tuple(None if v is None else v / most for v in row) for row in worth)
    stars = tuple(tuple(x is not None and x.score >= FAITHFUL for x in row) for row in cells)
    panel = MapPanel(f"{length} tokens", shown, tuple(map(str, bands)), tuple(map(str, windows)), stars)
    return maps([panel], "window", "band", Scale("score over keys read, best = 1", 0.0, 1.0, dark_is_high=True))
