"""Ways of comparing a row's query with those of the rows before it, and the nearest one by each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from longreach.methods.call import LayerCall
from longreach.ops import RotaryAngles
from longreach.ops.match import Nearest, Ring, nearest, recovered

Way = Literal["sqrt2d", "calibrated", "post", "cosine"]
WAYS: tuple[Way, ...] = get_args(Way)
SMALLEST = 32  # window of the paper's Figure 5


def windows_up_to(window: int) -> tuple[int, ...]:
    """32, 64, 128, ... and the window itself, the last."""
    found, size = [], SMALLEST
    while size < window:
        found.append(size)
        size *= 2
    return (*found, window)


class RowHistory(NamedTuple):
    """The last rows of one layer that was read, side by side: q [N, H, D] after rotation; the first is at `first`."""

    q: Tensor
    turn: RotaryAngles
    first: int


@dataclass
class Recent:
    """The last `size` rows of one layer, as passes over a sequence bring them."""

    size: int
    kept: RowHistory | None = None

    def extend(self, call: LayerCall) -> RowHistory:
        """The kept rows and those of the pass; then the last `size` of them are kept."""
        assert call.rotary is not None
        turn, q, first = call.rotary(), call.rows.q, int(call.rows.pos[0])
        if self.kept is not None:
            old = self.kept
            q, first = torch.cat([old.q, q]), old.first
            turn = RotaryAngles(torch.cat([old.turn.cos, turn.cos]), torch.cat([old.turn.sin, turn.sin]), turn.layout)
        last = slice(-self.size, None)
        mine = RotaryAngles(turn.cos[last].clone(), turn.sin[last].clone(), turn.layout)
        self.kept = RowHistory(q[last].clone(), mine, first + max(0, len(q) - self.size))
        return RowHistory(q, turn, first)


def compared(way: Way, known: RowHistory, weight: Tensor) -> Tensor:
    """[N, H, D]: the queries that squared L2 compares.

    sqrt2d, calibrated: before rotation, in channels or (times weight [H, D]) in logits, as the method does; post: after
    rotation; cosine: before rotation, all of length 1, so that d^2 = 2 (1 - cos).
    """
    dtype = known.q.dtype
    if way == "post":
        return known.q
    q = recovered(known.q, known.turn, weight if way == "calibrated" else None, dtype)
    if way == "cosine":
        size = q.float().norm(dim=-1, keepdim=True).clamp(min=1e-30)
        return (q.float() / size).to(dtype)
    return q


def ring_of(queries: Tensor, first: int, kv_heads: int) -> Ring:
    """A ring of one sequence that holds queries [N, H, D] at the positions from `first` on."""
    count, heads, dim = queries.shape
    ring = Ring.new(1, kv_heads, (heads, count, dim), queries)
    pos = torch.arange(first, first + count, device=queries.device)
    ring.query[0, :, pos % count] = queries.transpose(0, 1)
    ring.stamp[0, pos % count] = pos.int()
    return ring


def matches(queries: Tensor, first: int, pos: Tensor, kv_heads: int, windows: tuple[int, ...], oldest: int) -> Nearest:
    """The nearest rows in each window: distance and position [windows, R, H] for the rows at `pos` [R].

    queries: [N, H, D] from position `first` on, those of the rows and of the widest window before them among them.
    oldest: rows before this position are not taken.
    """
    ring = ring_of(queries, first, kv_heads)
    mine, slot = queries[pos.long() - first].contiguous(), torch.zeros_like(pos)
    found = [nearest(mine, slot, pos, ring, window=w, oldest=oldest) for w in windows]
    return Nearest(torch.stack([x.distance for x in found]), torch.stack([x.position for x in found]))
