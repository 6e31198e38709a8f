"""The front door of pooled_scores: what it refuses beyond what attend refuses too (tests/ops/test_checks.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.ops import Logits, pooled_scores
from longreach.testing.inputs import random_kv, random_rows

META = torch.device("meta")
TILE = torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tile": TILE}, "tile and tiles: give both or neither"),
        ({"tiles": 2}, "tile and tiles: give both or neither"),
        ({"tile": TILE.float(), "tiles": 2}, r"tile: expected int \[R=4\] on cpu, got float32"),
        ({"tile": TILE[:3], "tiles": 2}, r"tile: .* got int64\[3\]"),
        ({"tile": TILE.to(META), "tiles": 2}, "tile: .* got .*meta"),
        ({"tile": [0, 1, 1, 0], "tiles": 2}, "tile: .* got list"),
        ({"tile": TILE, "tiles": 1}, r"tile: expected values in \[0, 1\), got 0 to 1"),
        ({"tile": TILE - 1, "tiles": 2}, "got -1 to 0"),
        ({"tile": TILE, "tiles": -2}, "tiles: expected a count >= 0, got -2"),
        ({"tile": TILE, "tiles": 2.0}, "tiles: .* got 2.0"),
        ({"lse": torch.zeros(4, 2)}, r"lse: expected float \[4, 4\] on cpu, got float32\[4, 2\]"),
        ({"lse": torch.zeros(4, 4, dtype=torch.int64)}, "lse: .* got int64"),
        ({"lse": torch.zeros(4, 4, device=META)}, "lse: .* got .*meta"),
        ({"lse": 0.0}, "lse: .* got float"),
        ({"logits": Logits(torch.zeros(4, 2, 10, 2))}, "lse: kept logits need the lse that came with"),
        ({"logits": Logits(torch.zeros(3, 2, 10, 2))}, r"logits: expected .* = \[4, 2, 10, 2\] on cpu, got .*\[3, 2,"),
        ({"logits": torch.zeros(4, 2, 10, 2)}, "logits: expected Logits, got float32"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    kv = random_kv([7], heads=2, dim=8)
    with pytest.raises(InvalidInput, match=message):
        pooled_scores(random_rows(kv, 4), kv, scale=1.0, **wrong)
