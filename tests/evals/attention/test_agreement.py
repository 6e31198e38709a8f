"""Sets of heaviest keys: layers that want the same, other, or fewer keys; blocks of any size."""

from __future__ import annotations

import pytest
import torch

from longreach.evals.attention import agreement as module
from longreach.evals.attention.agreement import Agreement

ONE = torch.zeros(1, dtype=torch.int64)


def test_a_head_of_another_layer_that_wants_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "K", 2)
    found = Agreement(2, 2, 2, torch.device("cpu"))
    found.start(ONE)
    found.add(ONE, torch.tensor([[[0.5, 0.4, 0.1, 0.0], [0.0, 0.0, 0.5, 0.5]]]))
    found.add(ONE, torch.tensor([[[0.0, 0.1, 0.4, 0.5], [0.4, 0.1, 0.5, 0.0]]]))
    maps = found.maps(0)
    # layer 1, head 0 wants {2, 3}, as head 1 of layer 0 does; head 1 wants {0, 2}: half of either
    assert maps["recall"] == [[1.0, 0.75], [pytest.approx(0.75), 1.0]]
    assert maps["mass"][0] == [1.0, pytest.approx((1 + 0.5 / 0.9) / 2)]
    assert maps["mass"][1] == [None, 1.0]


def test_windows_hold_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "K", 3)
    found = Agreement(1, 2, 1, torch.device("cpu"))
    found.start(ONE)
    found.add(ONE, torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]))
    found.add(ONE, torch.tensor([[[0.0, 0.0, 0.5, 0.5]]]))
    maps = found.maps(0)
    assert maps["recall"][0][1] == pytest.approx(1 / 2) and maps["recall"][1][0] == pytest.approx(1 / 3)
    assert maps["mass"][0][1] == pytest.approx(0.5)


@pytest.mark.parametrize("most", [1, 100])
def test_blocks_and_kinds(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    kind = torch.tensor([0, 1, 1, 0, 1])
    layers = torch.rand(3, 5, 2, 400).softmax(-1)

    def measured(parts: list[torch.Tensor]) -> Agreement:
        made = Agreement(2, 3, 2, torch.device("cpu"))
        for part in parts:
            made.start(kind[part])
            for pooled in layers:
                made.add(kind[part], pooled[part])
        return made

    whole = measured([torch.arange(5)])
    monkeypatch.setattr(module, "MOST", most)
    apart = measured([torch.tensor([3, 1]), torch.tensor([0, 2, 4])])
    for name in ("recall", "mass", "rows"):
        assert torch.allclose(getattr(whole, name), getattr(apart, name))
    assert whole.rows.tolist() == [2, 3]
    random = whole.recall[0, 0, 0, 1, 1] / 2
    assert float(random) == pytest.approx(256 / 400, abs=0.1)
