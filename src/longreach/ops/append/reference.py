"""append in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def append(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, page: Tensor, offset: Tensor) -> None:
    place = (page.long(), slice(None), offset.long())
    keys[place] = k
    values[place] = v
