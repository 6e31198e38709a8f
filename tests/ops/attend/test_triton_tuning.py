"""The launch that attend chooses on a GPU, by shapes alone."""

from __future__ import annotations

import pytest
import torch

from longreach.ops.attend import triton_tuning


@pytest.mark.parametrize(
    ("page", "items", "unit"), [(16, 255, 64), (16, 256, 256), (64, 864, 256), (0, 864, 64), (16, 8, 64)]
)
def test_many_streams_on_pages_are_dealt_out_in_larger_units(
    page: int, items: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_tuning, "INTERPRETED", False)
    found = triton_tuning.tuning(torch.bfloat16, 128, 4, lists=False, page=page, dense=True, items=items)
    assert found.unit == unit and found.block == 64
    kept = triton_tuning.keeping_tuning(torch.bfloat16, 128, 4, page=page, items=items, values=True)
    assert kept.unit == kept.block, "a pass that writes logits has blocks at their multiples"
