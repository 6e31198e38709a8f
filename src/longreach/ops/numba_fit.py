"""Which arguments the Numba kernels take, and for which they are the faster implementation. Numba is not imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longreach.ops.types import KVView, Logits, Rows, ScoringKeys

NO_GRADIENT = "it has no backward pass and an input requires a gradient; use impl='reference', or torch.no_grad()"
ROWS = 8  # of a sequence: a matrix product of all keys serves more of them better


def few(*given: Any) -> bool:
    """Whether an op of these arguments has few rows of each sequence."""
    rows = next((x for x in given if isinstance(x, Rows)), None)
    kv = next((x for x in given if isinstance(x, KVView)), None)
    return rows is None or kv is None or len(rows.pos) <= ROWS * len(kv.seq_lens)


def called_by_cpu(*given: Any) -> bool:
    """Whether the CPU computes an op of these arguments for a GPU: few rows, over a view with calls."""
    kv = next((x for x in given if isinstance(x, KVView)), None)
    return kv is not None and kv.calls is not None and few(*given)


def unfit(*given: Any, fp64: bool = False) -> str | None:
    """Why Numba kernels cannot compute an op of these arguments; None if they can.

    fp64: whether they compute in fp64.
    """
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
            if tensor.dtype == torch.float64 and not fp64:
                return "it computes in fp32; for fp64 use impl='reference'"
            if wants and tensor.requires_grad:
                return NO_GRADIENT
    return None


def wants_gradient(*given: Any) -> bool:
    """Whether one of the arguments requires a gradient."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for x in given for tensor in _tensors(x))


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
