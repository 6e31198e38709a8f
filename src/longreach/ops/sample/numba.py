"""sample and draw on a CPU, compiled by Numba."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.numba_inputs import integers
from longreach.ops.numba_math import in_threads
from longreach.ops.sample import numba_kernels as kernels
from longreach.ops.sample.api import Sampled


def sample(
    x: Tensor, count: Tensor, length: Tensor, offset: Tensor, *, capacity: int, uniform: float, power: float,
    first: int, last: int,
) -> Sampled:  # fmt: skip
    used = torch.minimum(count.long().clamp(min=0), length.long()[:, None])
    columns = torch.empty(*x.shape[:2], capacity, dtype=torch.int32)
    weight, factor = torch.empty(2, *columns.shape).unbind()
    in_threads(
        torch.get_num_threads(), kernels.sample, _scores(x), used.numpy(), integers(length),
        offset.double().contiguous().numpy(), (float(uniform), float(power), first, last),
        (columns.numpy(), weight.numpy(), factor.numpy()),
    )  # fmt: skip
    return Sampled(columns, used.to(torch.int32), weight, factor)


def draw(x: Tensor, count: Tensor, length: Tensor, numbers: Tensor) -> Sampled:
    columns = torch.empty(numbers.shape, dtype=torch.int32)
    weight, factor = torch.empty(2, *columns.shape).unbind()
    used = torch.empty(columns.shape[:2], dtype=torch.int32)
    in_threads(
        torch.get_num_threads(), kernels.draw, _scores(x), integers(count), integers(length),
        numbers.double().contiguous().numpy(), (columns.numpy(), weight.numpy(), factor.numpy(), used.numpy()),
    )  # fmt: skip
    return Sampled(columns, used, weight, factor)


def _scores(x: Tensor) -> object:
    """fp32 or fp64 [L, heads, N], contiguous."""
    x = x.detach() if x.dtype == torch.float64 else x.detach().float()
    return x.contiguous().numpy()
