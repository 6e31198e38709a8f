"""The figures' numbers, against loops over the samples."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from longreach.adapters.transformers import shape_of
from longreach.evals.calibration.gather import gather, unpacked
from longreach.evals.calibration.prompts import Prompt
from longreach.evals.mac_study.gather import ReuseGather
from longreach.evals.mac_study.results import TAUS, StudyData, results
from longreach.testing.tiny import random_tokens, tiny_model
from tests.evals.mac_study.test_gather import WHAT, plan_for

TAU = 0.2
LAYERS, HEADS, DIM = 2, 4, 16


@pytest.fixture(scope="module")
def measured() -> tuple[list[Any], dict[str, Any]]:
    """Two prompts' parts, and the numbers."""
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    prompts = [Prompt(str(n), tuple(random_tokens(1, n, seed=n)[0].tolist())) for n in (101, 150)]
    parts = gather(model, prompts, ReuseGather(shape_of(model), plan_for(model), WHAT))
    return parts, results(StudyData(WHAT, plan_for(model), shape_of(model), parts), TAU)


def samples(parts: list[Any], way: str, layer: int, window: int, band: int) -> Any:
    """(head, row, distance, gap, skipped, error) of all; the error of the widest window."""
    for part in parts:
        distance, gap, error = (unpacked(part[name][way])[layer] for name in ("distance", "gap", "error"))
        for r, m in enumerate(part["rows"]):
            for head in range(HEADS):
                g = int(gap[window, r, head])
                entry = max(0, m - g + 1 - WHAT.bands[band] - WHAT.sinks)
                place = window % len(gap) - len(gap) + len(error)  # -1: the widest
                yield head, r, float(distance[window, r, head]), g, entry / (m + 1), float(error[place, r, head, band])


def test_acceptance_and_what_is_skipped(measured: tuple[list[Any], dict[str, Any]]) -> None:
    parts, found = measured
    assert found["rows"] == 12 and found["layers"] == [0, 1]
    band = WHAT.bands.index(WHAT.band)
    for scale, unit in (("sqrt2d", 2.0 * DIM), ("calibrated", 1.0)):
        for place, tau in enumerate(TAUS):
            for layer in range(LAYERS):
                limit = unit * (1 - tau) ** 2
                every = list(samples(parts, scale, layer, -1, band))
                hits = [x for x in every if x[2] < limit]
                told = found["thresholds"][scale]["layers"][layer][place]
                assert told["accepted"] == pytest.approx(len(hits) / len(every))
                assert told["skipped"] == pytest.approx(sum(x[4] for x in hits) / len(every), abs=1e-6)
                assert told["error"] == pytest.approx(sum(x[5] for x in hits) / len(every), abs=1e-6)
                for head in range(HEADS):
                    share = sum(x[0] == head for x in hits) / 12
                    assert found["thresholds"][scale]["heads_acceptance"][layer][place][head] == pytest.approx(share)
    accepted = [p["accepted"] for p in found["thresholds"]["sqrt2d"]["all"]]
    assert accepted == sorted(accepted, reverse=True) and accepted[0] > accepted[-1]


def test_a_group_reuses_together(measured: tuple[list[Any], dict[str, Any]]) -> None:
    parts, found = measured
    limit, place = 2 * DIM * (1 - TAUS[3]) ** 2, 3
    for layer in range(LAYERS):
        together = sum(
            2 * int(bool((unpacked(p["distance"]["sqrt2d"])[layer, -1, r, g : g + 2] < limit).all()))
            for p in parts for r in range(6) for g in (0, 2)
        )  # fmt: skip
        assert found["thresholds"]["sqrt2d"]["reuse_layers"][layer][place] == pytest.approx(together / 48)


def test_windows_bands_and_gaps(measured: tuple[list[Any], dict[str, Any]]) -> None:
    parts, found = measured
    limit = 2 * DIM * (1 - TAU) ** 2
    for w in range(2):
        accepted = [x for n in range(LAYERS) for x in samples(parts, "sqrt2d", n, w, 0) if x[2] < limit]
        assert found["window_band"]["acceptance"][w] == pytest.approx(len(accepted) / 96)
        mean = [sum(found["window"]["sqrt2d"]["acceptance"][n][w] for n in range(LAYERS)) / 2]
        assert mean == pytest.approx([len(accepted) / 96])
        for b in range(len(WHAT.bands)):
            some = [x for n in range(LAYERS) for x in samples(parts, "sqrt2d", n, w, b) if x[2] < limit]
            assert found["window_band"]["error"][b][w] == pytest.approx(sum(x[5] for x in some) / 96, abs=1e-6)
            assert found["window_band"]["read"][b][w] == pytest.approx(1 - sum(x[4] for x in some) / 96, abs=1e-6)
    edges = found["gap_band"]["edges"]
    assert edges == [1, 2, 4, 8, 16, 32, 64]
    for layer in range(LAYERS):
        for b in range(len(WHAT.bands)):
            for n, (low, high) in enumerate(pairwise(edges)):
                some = [x[5] for x in samples(parts, "sqrt2d", layer, -1, b) if x[2] < limit and low <= x[3] < high]
                told = found["gap_band"]["error"][layer][b][n]
                assert told == (pytest.approx(sum(some) / len(some), abs=1e-6) if some else None)


def test_the_plans_own_thresholds_and_what_is_equal(measured: tuple[list[Any], dict[str, Any]]) -> None:
    parts, found = measured
    band = WHAT.bands.index(WHAT.band)
    every = [x for n in range(LAYERS) for x in samples(parts, "calibrated", n, -1, band)]
    hits = [x for x in every if x[2] < 0.7**2]
    assert found["plan"]["calibrated"]["accepted"] == pytest.approx(len(hits) / 96)
    for way in ("sqrt2d", "calibrated", "post", "cosine"):
        shares = [p["accepted"] for p in found["equal_acceptance"][way]["one"]]
        assert shares == pytest.approx(found["equal_acceptance"][way]["shares"], abs=1 / 96)
        for share, p in zip(found["equal_skipped"]["shares"], found["equal_skipped"][way], strict=True):
            assert p is None or share <= p["skipped"] <= share + 1 / 96


def test_tables_hold_plain_numbers(measured: tuple[list[Any], dict[str, Any]]) -> None:
    def check(x: Any) -> None:
        if isinstance(x, dict):
            x = list(x.values())
        if isinstance(x, list):
            for y in x:
                check(y)
        else:
            assert x is None or isinstance(x, (int, float, str))

    check(measured[1])
