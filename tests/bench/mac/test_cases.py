"""MAC's cases: what must be reached, and what forced hits read."""

from __future__ import annotations

import pytest

from longreach.bench.case import Hits, Shape
from longreach.bench.cases import CASES, tiny

MAC = [case for case in CASES.values() if case.reuse and "mac" in case.group]
SHAPE = Shape(4, 32768)


def test_what_must_be_reached() -> None:
    bounds = {case.name: [round(t.bound, 2) for t in case.targets] for case in MAC if case.group != "mac-rates"}
    assert bounds == {
        "mac-hit-128k-b1": [8.0, 4.8], "mac-hit-128k-b8": [22.0], "mac-hit-128k-b32": [30.0],
        "mac-share-32k-b32": [13.5], "mac-share-64k-b32": [21.0], "mac-share-128k-b32": [34.0],
        "mac-share-256k-b32": [46.0], "mac-table-32k-b1": [1.12, 1.13, 1.14, 1.09],
        "mac-table-60k-b1": [2.13, 2.08, 2.02, 1.65], "mac-table-120k-b1": [3.68, 3.62, 2.97, 2.24],
        "mac-miss-128k-b1": [1.25], "mac-miss-128k-b32": [1.25, 1.25],
        "8b-mac-128k-b1": [1.6], "8b-mac-128k-b4": [3.2], "8b-mac-128k-most": [],
    }  # fmt: skip
    rates = [case for case in MAC if case.group == "mac-rates"]
    assert {(case.shape.batch, case.shape.context) for case in rates} == {
        (batch, context << 10) for batch in (1, 8, 32) for context in (32, 128)
    }
    assert all([(t.quantity, t.bound, t.over) for t in c.targets] == [("speed over", 0.95, "dense")] for c in rates)


@pytest.mark.parametrize("case", MAC, ids=lambda case: case.name)
def test_entries_have_names_of_their_own_that_targets_know(case) -> None:
    for reuse in (case.reuse, tiny(case).reuse):
        names = [hits.name for hits in reuse.hits]
        assert len(set(names)) == len(names)
        if case.model is None:
            assert {t.of for t in case.targets} | {t.over for t in case.targets if t.over} <= {*names, "dense"}
    for shape, reuse in ((case.shape, case.reuse), (tiny(case).shape, tiny(case).reuse)):
        for hits in reuse.hits:
            gap, band = hits.span(shape, reuse.window)
            assert 1 <= gap <= reuse.window and band >= 1 and gap + band < shape.context


@pytest.mark.parametrize(
    ("hits", "span"),
    [
        (Hits("", gap=64), (64, 256)),
        (Hits("", share=0.01), (71, 256)),  # 327 keys
        (Hits("", share=0.05), (350, 1288)),  # 1638 keys are more than 1024 + 256
        (Hits("", misses="one"), (350, 256)),
        (Hits("", misses="one", spread=True), (350, (32768 + 31 * 606) // 32 - 350)),
        (Hits("", misses="each", spread=True), (350, (4 * 32768 + 28 * 606) // 32 - 350)),
    ],
)
def test_spans(hits: Hits, span: tuple[int, int]) -> None:
    assert hits.span(SHAPE, 1024) == span


def test_spread_hits_read_what_those_with_a_miss_read() -> None:
    for misses in ("one", "each"):
        long, even = (Hits("", misses=misses, spread=s).streams(SHAPE, 1024) for s in (False, True))
        assert 0 <= long - even < 32
