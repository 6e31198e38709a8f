"""pack_lists in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_lists(index: Tensor, used: Tensor, offsets: Tensor, into: Tensor) -> None:
    column = torch.arange(index.shape[2], device=index.device)
    start, stop = (x.unflatten(0, used.shape)[..., None] for x in (offsets[:-1].long(), offsets[1:].long()))
    kept = (column < used[..., None]) & (start + column < stop)
    into[(start + column)[kept]] = index[kept]
