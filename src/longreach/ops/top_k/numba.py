"""top_k on a CPU, compiled by Numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longreach.ops.numba_inputs import integers, refuse
from longreach.ops.numba_math import flat, in_threads
from longreach.ops.top_k import numba_kernels as kernels


def top_k(x: Tensor, count: Tensor, length: Tensor, *, first: int, last: int, capacity: int) -> tuple[Tensor, Tensor]:
    refuse("top_k", x)
    lists, heads, columns = x.shape
    x = x.float()
    starts = np.arange(lists)[:, None] * x.stride(0) + np.arange(heads) * x.stride(1)
    till = integers(length if length.dim() == 2 else length[:, None])
    till = np.broadcast_to(np.clip(till, 0, columns), (lists, heads))
    used = np.minimum(np.maximum(integers(count), 0), till)
    index = torch.empty(lists * heads, capacity, dtype=torch.int32)
    rows = (starts.reshape(-1), used.reshape(-1), till.reshape(-1))
    workers = min(torch.get_num_threads(), max(1, lists * heads))
    in_threads(workers, kernels.top_k, flat(x).view(np.uint32), *rows, first, last, index.numpy())
    return index.view(lists, heads, capacity), torch.from_numpy(used.astype(np.int32))
