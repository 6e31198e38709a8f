"""What MAC's calibration computes, beside plain sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from longreach.methods.mac.calibrate import (
    BANDS,
    BINS,
    OF_EQUALS,
    choose_band,
    choose_window,
    counts,
    edge,
    energy,
    masses,
    nearest,
    plan_of,
    quantile,
    share_below,
    tau_of,
    unrelated,
)
from longreach.methods.mac.policy import limit_of
from longreach.ops import RotaryAngles, angles, rotate


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_energy_is_what_differences_of_queries_meet(layout: Any, scaling: float) -> None:
    """Over keys at all positions, the mean square of (q - q') k is the sum of squares of q - q' times the energies: at
    any one position the pairs of a key turn alike, and over many the phases even out."""
    draw = torch.Generator().manual_seed(0)
    keys, pos = torch.randn(1, 1, 16, generator=draw).double(), torch.arange(20000)
    cos, sin = angles(pos, torch.tensor([1.0, 0.7, 0.31, 0.13]), scaling=scaling)
    turn = RotaryAngles(cos, sin, layout)
    turned = rotate(keys.expand(20000, 1, 16), cos[:, None], sin[:, None], layout=layout)
    apart = torch.randn(16, generator=draw).double()
    meets = rotate(apart.expand(1, 1, 16), *(scaling * x for x in (torch.ones(1, 4), torch.zeros(1, 4))), layout=layout)
    logits = (turned * meets).sum(-1)
    found = energy(turned, turn).mean(0)[0]
    pairs = [(i, i + 4) if layout == "half" else (2 * i, 2 * i + 1) for i in range(4)]
    for a, b in pairs:
        assert float(found[a]) == pytest.approx(float(found[b]))
    torch.testing.assert_close(found[8:], keys[0, 0, 8:].square())
    rest = apart[8:] * keys[0, 0, 8:]  # channels that do not turn add up, those that do meet all phases
    want = (apart.square() * found)[:8].sum() + rest.sum().square()
    assert float(logits.square().mean()) == pytest.approx(float(want), rel=0.02)


def test_masses_of_the_last_keys() -> None:
    draw, pos = torch.Generator().manual_seed(1), torch.tensor([9, 30])
    share = torch.rand(2, 3, 31, generator=draw)
    share[0, :, 10:] = 0
    share = share / share.sum(-1, keepdim=True)
    found = masses(share, pos, (1, 8, 64), 2)
    for h in range(3):
        for place, band in enumerate((1, 8, 64)):
            want = 0.0
            for r, p in enumerate((9, 30)):
                kept = share[r, h].double().clone()
                kept[:2] = 0
                want += float(kept[max(0, p + 1 - band) : p + 1].sum() / kept.sum())
            assert float(found[h, place]) == pytest.approx(want)


def test_counted_distances_have_the_quantiles_of_the_distances() -> None:
    """To a thirty-second of an octave."""
    draw = torch.Generator().manual_seed(2)
    x = torch.rand(50000, generator=draw).double().pow(3) * 90
    x[:10] = 0
    found = counts(x.view(100, 500))
    assert int(found.sum()) == 50000 and found.shape == (BINS,)
    assert torch.equal(found, counts(x[:20000]) + counts(x[20000:]))
    for share in (0.01, 0.1, 0.3, 0.9):
        got, want = quantile(found, share), float(x.quantile(share))
        assert want / 2 ** (2 / 32) <= got <= want, "a little less rather than more"
        assert share_below(found, got) <= share and share_below(found, got) == pytest.approx(share, abs=0.02)
    assert quantile(found, 1e-6) == 0.0, "below all bins"
    assert quantile(counts(torch.empty(0)), 0.5) == 0.0 and share_below(counts(torch.empty(0)), 1.0) == 0.0
    assert (edge(0), edge(1), edge(33), edge(BINS)) == (0.0, 2.0**-24, 2.0**-23, 2.0**12)
    assert counts(torch.tensor([1e9, 1e-30])).nonzero()[:, 0].tolist() == [1, BINS - 1]


def test_queries_as_good_as_equal_have_a_bin_of_their_own() -> None:
    """The tightest threshold there is accepts them, and nothing else; a threshold of 0 accepts nothing."""
    found = counts(torch.tensor([0.0, 0.0, 0.0, 1e-30, 1.0]))
    assert int(found[0]) == 3 and share_below(found, 1e-8) == pytest.approx(0.6) and share_below(found, 0.0) == 0.0
    assert share_below(found, 1e-6) == pytest.approx(0.8) and share_below(found, 2.0) == 1.0
    assert quantile(found, 0.5) == 0.0 == quantile(found, 0.7), "below what lies between 0 and the first edge"
    assert 0.9 < quantile(found, 0.9) <= 1.0


def test_pairs_far_apart_and_the_nearest_in_windows() -> None:
    draw = torch.Generator().manual_seed(3)
    q, pos = torch.randn(6, 2, 8, generator=draw), torch.tensor([0, 4, 9, 10, 20, 31])
    found = unrelated(q, pos, 10)
    pairs = [(i, j) for i in range(6) for j in range(i + 1, 6) if abs(int(pos[i] - pos[j])) >= 10]
    want = [[float((q[i, h] - q[j, h]).square().sum()) for i, j in pairs] for h in range(2)]
    torch.testing.assert_close(found, torch.tensor(want))
    near = nearest(q[5], q[:5], (1, 3, 4, 100))
    for place, window in enumerate((1, 3, 4, 5)):
        least = [min(float((q[5, h] - q[j, h]).square().sum()) for j in range(5 - window, 5)) for h in range(2)]
        torch.testing.assert_close(near[place], torch.tensor(least))


def test_thresholds_and_their_distances() -> None:
    for scale, dim in (("sqrt2d", 64), ("calibrated", 64)):
        for tau in (0.0, 0.3, 0.9):
            assert tau_of(scale, limit_of(scale, tau, dim), dim) == pytest.approx(tau)  # type: ignore[arg-type]
    assert limit_of("sqrt2d", 0.45, 128) == pytest.approx((math.sqrt(256) * 0.55) ** 2)
    assert limit_of("calibrated", 0.45, 128) == pytest.approx(0.55**2)
    assert tau_of("calibrated", 5.0, 8) == 0.0 and tau_of("sqrt2d", 0.0, 8) == OF_EQUALS


def test_choices() -> None:
    assert choose_band([0.5, 0.94, 0.951, 1.0], (8, 16, 32, 64), 0.05, 64) == 32
    assert choose_band([0.5, 0.94, 0.951, 1.0], (8, 16, 32, 64), 0.05, 32) == 32, "as wide as the widest allowed"
    assert choose_band([0.5, 0.94, 0.951, 1.0], (8, 16, 32, 64), 0.05, 16) is None
    assert choose_band([0.2] * 4, (8, 16, 32, 64), 0.05, 64) is None
    assert choose_window([0.1, 0.79, 0.8, 0.8], (1, 2, 3, 4)) == 3
    assert choose_window([0.1, 0.7929, 0.8, 0.8], (1, 2, 3, 4)) == 2
    assert choose_window([0.0, 0.0], (1, 2)) == 1


def test_a_plan_is_made_of_counts() -> None:
    """Unrelated pairs at distances of 1 to 100 in one layer, none of another, which attends to a window."""
    far, close = torch.zeros(2, BINS, dtype=torch.int64), torch.zeros(2, 2, BINS, dtype=torch.int64)
    far[0] = counts(torch.arange(1.0, 101.0))
    close[0, 0], close[0, 1] = counts(torch.tensor([0.1, 50.0])), counts(torch.tensor([0.1, 0.2]))
    mass = [[0.5] * 3 + [0.96] + [1.0] * (len(BANDS) - 4), [0.0] * len(BANDS)]
    plan, accepted = plan_of(
        (4, 9), mass, (True, False), {"sqrt2d": far, "calibrated": far / 1}, {"sqrt2d": close, "calibrated": close},
        torch.ones(2, 1, 8), alpha=0.05, epsilon=0.05, widest=512, sinks=3,
    )  # fmt: skip
    assert plan.window == (9, 1) and plan.band == (BANDS[3], None) and plan.sinks == 3
    limit = limit_of("sqrt2d", plan.tau["sqrt2d"][0], 8)
    assert 5 < limit <= 6 and plan.tau["calibrated"] == (0.0, 0.0) and plan.tau["sqrt2d"][1] == 0.0
    assert accepted["sqrt2d"][0] == [0.5, 1.0]
