"""Rows cut by query heads, for kernels whose programs hold fewer than a KV head has."""

from __future__ import annotations

from torch import Tensor


def part_of(group: int, most: int) -> int:
    """Query heads of a part: the largest divisor of the group up to `most`."""
    return max(n for n in range(1, min(group, most) + 1) if group % n == 0)


def apart(x: Tensor, kv_heads: int, parts: int) -> Tensor:
    """[R, H, ...] -> [R * parts, H / parts, ...], each row's parts one after another; a view for one KV head."""
    split = x.unflatten(1, (kv_heads, parts, -1)).transpose(1, 2)
    return split.reshape(-1, x.shape[1] // parts, *x.shape[2:])


def together(x: Tensor, kv_heads: int, parts: int) -> Tensor:
    """Inverse of `apart`: [R * parts, H / parts, ...] -> [R, H, ...]."""
    split = x.unflatten(1, (kv_heads, -1)).unflatten(0, (-1, parts))
    return split.transpose(1, 2).flatten(1, 3)
