"""Queries kept from pass to pass, and how like they are, against plain loops in fp64."""

from __future__ import annotations

import pytest
import torch

from longreach.evals.attention import queries as module
from longreach.evals.attention.queries import RecentQueries, likeness


@pytest.mark.parametrize("most", [1, 200, 1 << 24])
def test_likeness(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(module, "RECENT", 7)
    monkeypatch.setattr(module, "MOST", most)
    q = torch.randn(23, 3, 8)
    q[20] = q[12]  # too long ago to be found
    q[19, 1] = 1.01 * q[13, 1]
    index = torch.tensor([1, 5, 19, 20, 22])
    found = likeness(q, index)
    for r, row in enumerate(index.tolist()):
        for head in range(3):
            mine, before = q[row, head].double(), q[max(0, row - 7) : row, head].double()
            cosines = torch.nn.functional.cosine_similarity(before, mine[None])
            nearest = float((before - mine).norm(dim=-1).min())
            assert float(found["previous"][r, head]) == pytest.approx(float(cosines[-1]), abs=1e-5)
            assert float(found["best"][r, head]) == pytest.approx(float(cosines.max()), abs=1e-5)
            close = [float(nearest < (2 * 8) ** 0.5 * (1 - tau)) for tau in (0.45, 0.75)]
            assert found["match"][r, head].tolist() == close
    assert found["match"][2, 1].tolist() == [1, 1] and float(found["best"][2, 1]) == pytest.approx(1)
    assert float(found["best"][3, 0]) < 0.99


def test_passes_of_any_length_give_the_queries_just_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECENT", 5)
    q, recent, first = torch.randn(20, 2, 4), RecentQueries(), 0
    for length in (3, 1, 9, 1, 6):
        joined, kept = recent.extend(0, q[first : first + length])
        assert kept == min(first, 5) and torch.equal(joined, q[first - kept : first + length])
        first += length
    assert recent.extend(1, q[:2])[1] == 0
