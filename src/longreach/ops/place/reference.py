"""place in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from longreach.ops.rope import RotaryAngles, rotate


def place(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, page: Tensor, offset: Tensor, angles: RotaryAngles
) -> None:
    at = (page.long(), slice(None), offset.long())
    keys[at] = rotate(k, angles.cos[:, None], angles.sin[:, None], layout=angles.layout)
    values[at] = v
