"""A plan of made-up content."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from longreach.plans import Made, Plan, PlannedModel

MODEL = PlannedModel("some-model", "c0ffee" * 10, layers=4, query_heads=4, kv_heads=2, head_dim=16)
MADE = Made("a text", "ab" * 32, 4096, {"length": 1024, "prompts": 4}, 0, "0.1", "f00d", "2.13.0", "5.23.0", "a CPU")


def plan(kind: str = "mac", **changes: Any) -> Plan:
    """Two small arrays and a large one."""
    draw = torch.Generator().manual_seed(0)
    arrays = {
        "small": torch.randn(3, 2, generator=draw),
        "counts": torch.tensor([[1, 2**31 - 1]], dtype=torch.int32),
        "large": torch.randn(40, 128, generator=draw).bfloat16(),
    }
    values = {"taus": [0.1, 0.2], "list": [[1, 2], [3]], "word": "a [text]\nof {two} lines", "none": None}
    return replace(Plan(kind, MODEL, values, MADE, arrays), **changes)
