"""The front door of top_k."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.doors import Op
from longreach.ops.impl import Implementations
from longreach.ops.types import INTS, describe, require

SCORES = (torch.float32, torch.float16, torch.bfloat16)
MOST_COLUMNS = 1 << 30

IMPLEMENTATIONS = Implementations(
    "top_k",
    {name: f"longreach.ops.top_k.{name}:top_k" for name in ("reference", "triton", "numba")},
)


def top_k(
    x: Tensor,
    count: Tensor,
    length: Tensor,
    *,
    capacity: int,
    first: int = 0,
    last: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The columns of each row's k largest scores, in ascending order, as index and count for `Lists`.

    x: [L, heads, N], the last dimension contiguous, fp32, fp16 or bf16 (compared as fp32, which changes no order).
    count: int [L, heads], k of each row, on the device; a k below 0 counts as 0, one above the length as the length.
    length: int [L] or [L, heads]: columns [0, length) hold scores, what lies behind them changes nothing.
    first, last: this many first columns and last ones of the length are chosen before all others, as part of the k.
        Where k is smaller than both, the last ones are taken from the end, then the first ones from the start.
    capacity: entries of a list.

    Exact: larger values win, among equal ones lower columns; -0.0 equals 0.0, infinities are numbers like others, NaN
    is smaller than all numbers and equal to itself.

    Returns index int32 [L, heads, capacity] and used int32 [L, heads], the number of entries in use: k, cut to the
    length. Entries past it may be anything. Where it exceeds the capacity, all of them are: `Lists` then reports
    an overflow and the row reads its dense span, so nothing is cut silently.
    Nothing waits for the device; in a CUDA graph count and length may change between replays.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, UnknownName for an unknown impl.
    """
    ok = isinstance(x, Tensor) and x.dim() == 3 and x.dtype in SCORES
    require(ok, lambda: f"x: expected fp32, fp16 or bf16 [L, heads, N], got {describe(x)}")
    lists, heads, columns = x.shape
    require(columns < MOST_COLUMNS, lambda: f"x: expected fewer than {MOST_COLUMNS} columns, got {columns}")
    require(
        x.stride(2) == 1 or columns <= 1,
        lambda: f"x: expected a contiguous last dimension, got strides {x.stride()}; call .contiguous()",
    )
    ok = isinstance(count, Tensor) and count.dtype in INTS and count.shape == (lists, heads)
    require(ok, lambda: f"count: expected int32 or int64 [L={lists}, heads={heads}], got {describe(count)}")
    ok = isinstance(length, Tensor) and length.dtype in INTS and length.shape in ((lists,), (lists, heads))
    require(
        ok, lambda: f"length: expected int32 or int64 [L={lists}] or [{lists}, heads={heads}], got {describe(length)}"
    )
    for name, tensor in (("count", count), ("length", length)):
        require(tensor.device == x.device, lambda: f"{name}: expected on {x.device} like x, got {describe(tensor)}")
    for name, number, least in (("first", first, 0), ("last", last, 0), ("capacity", capacity, 1)):
        ok = isinstance(number, int) and least <= number < MOST_COLUMNS
        require(ok, lambda: f"{name}: expected an int in [{least}, {MOST_COLUMNS}), got {number!r}")
    if length.device.type == "cpu" and length.numel():  # elsewhere reading values would cost a sync
        low, high = int(length.min()), int(length.max())
        require(low >= 0 and high <= columns, lambda: f"length: expected in [0, N={columns}], got {low} to {high}")
    compute = IMPLEMENTATIONS.get(impl, x.device, x)
    return compute(x, count, length, first=first, last=last, capacity=capacity)


TOP_K = Op(top_k, IMPLEMENTATIONS, ())
