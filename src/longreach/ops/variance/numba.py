"""sampling_variance on a CPU, compiled by Numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longreach.ops.numba_inputs import floats, integers, memory_of, reach_of, refuse
from longreach.ops.numba_math import in_threads
from longreach.ops.selection import Lists
from longreach.ops.types import KVView, Partial, Rows
from longreach.ops.variance import numba_kernels as kernels
from longreach.ops.variance.api import list_numbers

NO_WEIGHT = np.zeros((1, 1), np.float32)


def sampling_variance(
    rows: Rows, kv: KVView, lists: Lists, factor: Tensor, whole: Partial, *, scale: float, softcap: float | None
) -> Tensor:
    refuse("sampling_variance", rows, kv, whole.out, lists.log_weight)
    count, heads, dim = rows.q.shape
    width, number = list_numbers(rows, kv, lists)
    units, room = heads // width, lists.index.shape[2]
    q = (rows.q.float() * scale).contiguous().view(count * units, width, dim)
    index = np.ascontiguousarray(lists.index.numpy(), np.int32).reshape(-1, room)
    weighted = lists.log_weight is not None
    weight = NO_WEIGHT if lists.log_weight is None else floats(lists.log_weight).reshape(-1, room)
    given = (integers(number).reshape(-1), index, integers(lists.count).reshape(-1), floats(factor).reshape(-1, room))
    means = (floats(whole.out).reshape(count * units, width, dim), floats(whole.lse).reshape(count * units, width))
    workers = torch.get_num_threads()
    found = np.zeros((workers, count * units, width), np.float32)
    in_threads(
        workers, kernels.deviations, q.numpy(), memory_of(kv), integers(rows.seq), reach_of(rows, kv),
        (units, units // kv.heads), given, weighted, weight, means, float(softcap or 0.0), found,
    )  # fmt: skip
    return torch.from_numpy(found).sum(0).view(count, heads)
