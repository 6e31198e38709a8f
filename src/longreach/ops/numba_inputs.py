"""What the Numba implementations of all ops share on the host: arrays for their kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.numba_fit import unfit
from longreach.ops.numba_math import flat
from longreach.ops.types import KVView, Rows

Memory = tuple[np.ndarray, np.ndarray, tuple[int, ...], tuple[int, ...], np.ndarray, bool, int]
NO_TABLE = np.zeros((1, 1), np.int64)


def refuse(op: str, *given: Any) -> None:
    """Raise Unsupported for inputs that a Numba kernel of `op` cannot take and the reference can."""
    why = unfit(*given)
    if why is not None:
        raise Unsupported(f"{op}'s Numba kernel: {why}")


def integers(x: Tensor) -> np.ndarray:
    """int64, contiguous."""
    return np.ascontiguousarray(x.numpy(), np.int64)


def floats(x: Tensor) -> np.ndarray:
    """float32, contiguous."""
    return x.detach().to(torch.float32).contiguous().numpy()


def reach_of(rows: Rows, kv: KVView) -> np.ndarray:
    """int64 [R]: slots below this are visible to a row."""
    reach: np.ndarray = np.minimum(integers(kv.seq_lens)[integers(rows.seq)], integers(rows.pos) + 1)
    return np.maximum(reach, 0)


def memory_of(kv: KVView) -> Memory:
    """k, v as flat memory, their strides of (page, head, slot) in elements, the block table, if paged, slots a page."""
    table = NO_TABLE if kv.block_table is None else integers(kv.block_table)
    return flat(kv.k), flat(kv.v), kv.k.stride()[:3], kv.v.stride()[:3], table, kv.block_table is not None, kv.page
