"""Weights by place and by size, on weights that a reader can add up."""

from __future__ import annotations

import pytest
import torch

from longreach.evals.attention.masses import by_place, by_size, distances


def test_edges_hold_every_distance() -> None:
    assert distances(1) == [0, 1] and distances(2) == [0, 1, 2]
    assert distances(4096)[-1] == 4096 and distances(4097)[-1] == 8192
    assert distances(9) == [0, 1, 2, 4, 8, 16]


def test_by_place() -> None:
    share = torch.zeros(2, 1, 300)
    share[0, 0, [0, 3, 4, 100, 236, 299]] = torch.tensor([0.1, 0.2, 0.05, 0.3, 0.15, 0.2])
    share[1, 0, [0, 1]] = torch.tensor([0.25, 0.75])  # the second row is the text's second position
    edges = distances(300)
    found = by_place(share, torch.tensor([299, 1]), edges)
    assert found["sinks"][:, 0].tolist() == pytest.approx([0.3, 1.0])
    assert found["windows"][0, 0].tolist() == pytest.approx([0.35, 0.65])  # 236 is the 64th from the end
    assert found["windows"][1, 0].tolist() == pytest.approx([1.0, 1.0])
    expected = dict.fromkeys(range(len(edges) - 1), 0.0) | {0: 0.2, 6: 0.15, 8: 0.3, 9: 0.05}  # 63, 199 and 295 back
    assert found["distance"][0, 0].tolist() == pytest.approx(list(expected.values()))
    assert found["distance"][1, 0].tolist() == [0.0] * (len(edges) - 1)


def test_by_size() -> None:
    share = torch.full((1, 2, 2000), 0.0)
    share[0, 0, ::2] = 1 / 1000
    share[0, 1, 7] = 1.0
    found = by_size(share)
    assert found["tops"][0, 0].tolist() == pytest.approx([0.016, 0.064, 0.256, 1.0])
    assert found["tops"][0, 1].tolist() == [1.0] * 4
    assert float(found["cover"][0, 0]) in (950, 951) and float(found["cover"][0, 1]) == 1


def test_fewer_keys_than_are_asked_for() -> None:
    found = by_size(torch.full((1, 1, 10), 0.1))
    assert found["tops"][0, 0].tolist() == pytest.approx([1.0] * 4) and float(found["cover"][0, 0]) == 10
