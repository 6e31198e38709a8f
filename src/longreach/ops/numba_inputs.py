"""What the Numba implementations of all ops share on the host: what they can compute, and arrays for their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.numba_math import flat
from longreach.ops.types import KVView, Logits, Rows, ScoringKeys

ROWS = 8  # of a sequence: a matrix product of all keys serves more of them better
Memory = tuple[np.ndarray, np.ndarray, tuple[int, ...], tuple[int, ...], np.ndarray, bool, int]
NO_TABLE = np.zeros((1, 1), np.int64)


def suits(*given: Any) -> bool:
    """Whether a Numba kernel is the faster implementation of an op of these arguments on a CPU, and can compute it."""
    rows = next((x for x in given if isinstance(x, Rows)), None)
    kv = next((x for x in given if isinstance(x, KVView)), None)
    few = rows is None or kv is None or len(rows.pos) <= ROWS * len(kv.seq_lens)
    return few and unfit(*given) is None


def unfit(*given: Any) -> str | None:
    """Why Numba kernels cannot compute an op of these arguments; None if they can."""
    wants = torch.is_grad_enabled()
    for x in given:
        if isinstance(x, KVView) and x.slot_pos is not None:
            return "it takes slots in the order of their positions; compact what was kept, or use impl='reference'"
        if isinstance(x, ScoringKeys):
            return "it scores keys as they are; leave the 8-bit copy out, or use impl='reference'"
        if isinstance(x, Logits) and x.top is not None:
            return "it takes fp32 logits; keep them by impl='numba', or use impl='reference'"
        for tensor in _tensors(x):
            if tensor.device.type != "cpu":
                return f"it runs on a CPU, got {tensor.device}"
            if tensor.dtype == torch.float64:
                return "it computes in fp32; for fp64 use impl='reference'"
            if wants and tensor.requires_grad:
                return (
                    "it has no backward pass and an input requires a gradient; use impl='reference', or torch.no_grad()"
                )
    return None


def _tensors(x: Any) -> Iterator[Tensor]:
    """The tensors of numbers in an argument."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Rows):
        yield x.q
    elif isinstance(x, KVView):
        yield from (x.k, x.v)
    elif isinstance(x, Logits):
        yield x.x
    elif isinstance(x, tuple):  # a NamedTuple of them
        yield from (y for y in x if isinstance(y, Tensor))


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
