"""Attention to summaries of blocks, together with the choice of blocks by the same logits (Block-MKA, S5.3-5.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.doors import Op
from longreach.ops.impl import Implementations
from longreach.ops.recall.api import check_choice, check_ranges
from longreach.ops.types import KVView, Pieces, Rows

ATTENDING = Implementations(
    "attend_summaries",
    {
        "reference": "longreach.ops.recall.reference:attend_summaries",
        "triton": "longreach.ops.recall.triton_attending:attend_summaries",
    },
)


def attend_summaries(
    rows: Rows, summaries: KVView, start: Tensor | None, stop: Tensor, *, scale: float, impl: str = "auto"
) -> Pieces:
    """Attention of few rows to the summaries of blocks [start, stop): level 2 of Block-MKA, in pieces to be merged.

    rows: q [R, H, D]; positions are not used. summaries: k and v [P, G, units, D], mean keys rotated to the middle of
    the block, and mean values; seq_lens counts the blocks of each sequence. start, stop: int [R] on the device, as
    `recall` takes them.

    Returns Pieces, out fp32 [S, R, H, D] (fp64 for fp64): over the keys of all pieces out = sum softmax(scale q . k) v
    and lse = log sum exp(scale q . k). No gradient flows through the result. One kernel on a GPU, whose launch depends
    on shapes alone. Raises what `recall` raises.
    """
    found, _, _ = _compute(rows, summaries, start, stop, None, scale, impl)
    return found


def recall_and_attend(
    rows: Rows, summaries: KVView, start: Tensor | None, stop: Tensor, *, count: int, scale: float, impl: str = "auto"
) -> tuple[Tensor, Tensor, Pieces]:
    """`recall` with pool="softmax" and `attend_summaries` in one pass over the summaries, for few rows.

    Arguments as of both. Returns index int32 [R, G, count] and used int32 [R, G] of `recall`, and the Pieces. Two
    kernels on a GPU; beside the result R x H x units fp32 logits are held. Raises what `recall` raises.
    """
    found, index, used = _compute(rows, summaries, start, stop, count, scale, impl)
    assert index is not None and used is not None
    return index, used, found


def _compute(
    rows: Rows, summaries: KVView, start: Tensor | None, stop: Tensor, count: int | None, scale: float, impl: str
) -> tuple[Pieces, Tensor | None, Tensor | None]:
    check_ranges(rows, summaries, start, stop)
    check_choice(1 if count is None else count, scale)
    with torch.no_grad():
        found: tuple[Pieces, Tensor | None, Tensor | None] = ATTENDING.get(impl, rows.q.device, rows, summaries.k)(
            rows, summaries, start, stop, count=count, scale=scale
        )
    return found


# callers count the reads of both, the same in all layers
ATTEND_SUMMARIES = Op(attend_summaries, ATTENDING, ("rows", "kv", "scale"))
RECALL_AND_ATTEND = Op(recall_and_attend, ATTENDING, ("rows", "kv", "scale"))
