"""attend_blocks in plain PyTorch: attention to each level, then the mixture."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.attend import attend
from longreach.ops.mix.reference import mix
from longreach.ops.partial import merge_pieces
from longreach.ops.selection import Lists, Span, Spans, absolute, relative
from longreach.ops.types import KVView, Partial, Pieces, Rows


def attend_blocks(
    rows: Rows, kv: KVView, first: Tensor, recalled: tuple[Tensor, Tensor] | None, summaries: Pieces | None,
    weights: Tensor, *, block: int, window: int, scale: float, levels: tuple[int, ...],
) -> Partial:  # fmt: skip
    near = Spans((Span(absolute(first[:, None]), relative(1)),))
    found = {1: attend(rows, kv, near, scale=scale, impl="reference")}
    if summaries is not None:
        found[2] = merge_pieces(summaries)
    if recalled is not None:
        found[3] = attend(rows, kv, Lists(*recalled, block=block), scale=scale, impl="reference")
    weights = weights.clamp(min=0)
    weights[:, 0] = weights[:, 0].masked_fill((weights == 0).all(1), 1.0)
    some = torch.stack([weights[:, levels.index(level)] for level in found], 1)
    return mix(tuple(found.values()), some[:, None].expand(-1, rows.q.shape[1], -1))
