"""nearest and match on a CPU, compiled by Numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longreach.ops.match import numba_kernels as kernels
from longreach.ops.match.ring import DEEPEST, Ring
from longreach.ops.match.rule import DEPTHS, NOTES, Matched, Nearest, Rule, tie
from longreach.ops.numba_inputs import integers, refuse
from longreach.ops.numba_math import flat, in_threads
from longreach.ops.rope import RotaryAngles
from longreach.ops.types import Rows

WIDE = 4  # bytes of a number of an entry, and of an account


def nearest(
    query: Tensor, slot: Tensor, pos: Tensor, ring: Ring, *, window: int, oldest: int, near: int, far: int,
    deepest: int | None,
) -> Nearest:  # fmt: skip
    refuse("nearest", query, ring.query)
    count, heads, _ = query.shape
    distance = torch.empty(count, heads)
    position = torch.empty(count, heads, dtype=torch.int32)
    in_threads(
        torch.get_num_threads(), kernels.nearest, flat(query.contiguous()), tuple(query.shape), _memory(ring),
        integers(slot), integers(pos), _law(ring, window, oldest, near, far, deepest, np.inf),
        (distance.numpy(), position.numpy()),
    )  # fmt: skip
    return Nearest(distance, position)


def match(
    rows: Rows, slots: Tensor, ring: Ring, rule: Rule, rotary: RotaryAngles | None, weight: Tensor | None
) -> Matched:
    refuse("match", rows, ring.query, weight)
    count, heads, dim = rows.q.shape
    query = rows.q.detach() if rotary is None else rotary.undo(rows.q.detach())
    query = query if weight is None else (query.float() * weight.detach().float()).to(ring.query.dtype)
    element = ring.query.element_size()
    row_bytes = dim * element + 4 + (0 if rule.deepest is None else 2)  # query, stamp, depth
    entry_bytes = (dim + 1) * WIDE + 2  # out and lse, the depth
    numbers = (
        rule.band, rule.sinks, rule.min_context, rule.rest, np.float32(rule.price), np.float32(rule.reuses),
        np.float32(rule.patience), row_bytes, entry_bytes, DEEPEST, np.array(DEPTHS),
    )  # fmt: skip
    start, read_entry, write_entry = torch.empty(3, count, heads, dtype=torch.int32).unbind()
    reads = torch.empty(count, ring.kv_heads, 2, dtype=torch.int32)
    notes = torch.empty(count, heads, len(NOTES))
    law = _law(ring, rule.window, rule.oldest, rule.near, rule.far, rule.deepest, rule.limit)
    in_threads(
        torch.get_num_threads(), kernels.match, flat(query.contiguous()), (count, heads, dim), _memory(ring),
        ring.credit.numpy(), integers(slots[rows.seq.long()]), integers(rows.pos), law, numbers,
        (start.numpy(), read_entry.numpy(), write_entry.numpy(), reads.numpy(), notes.numpy()),
    )  # fmt: skip
    return Matched(start, read_entry, write_entry, reads, notes)


def _memory(ring: Ring) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return flat(ring.query), ring.stamp.numpy(), ring.depth.numpy()


def _law(
    ring: Ring, window: int, oldest: int, near: int, far: int, deepest: int | None, limit: float
) -> tuple[object, ...]:
    """What a search needs, as the kernels take it. Depths end below 2^15."""
    most = 1 << 15 if deepest is None else deepest
    return window, oldest, near, far, most, np.float32(limit), np.float32(tie(ring.query.dtype))
