"""Where a falling curve crosses another time."""

from __future__ import annotations

import pytest

from longreach.bench.mac.break_even import break_even

CURVE = [(0.0, 12.0), (0.5, 11.0), (0.9, 7.0), (1.0, 2.0)]


@pytest.mark.parametrize(("other", "at"), [(13.0, 0.0), (9.0, 0.7), (11.0, 0.5), (4.5, 0.95), (2.0, None), (1.0, None)])
def test_the_rate_from_which_on_it_is_faster(other: float, at: float | None) -> None:
    assert break_even(CURVE, other, 1) == (None if at is None else pytest.approx(at))


def test_time_falls_with_the_kv_heads_that_reuse() -> None:
    """Heads that hit on their own save nothing: a KV head of four takes all of them."""
    curve = [(rate, 10 - 8 * rate**4) for rate in (0.0, 0.4, 1.0)]
    assert break_even(curve, 6.0, 4) == pytest.approx(0.5**0.25)


def test_a_curve_that_rises_again_counts_from_its_last_crossing() -> None:
    assert break_even([(0.0, 5.0), (0.5, 11.0), (1.0, 9.0)], 10.0, 1) == pytest.approx(0.75)
