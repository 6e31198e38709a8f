"""Passes that keep logits, and passes over kept logits, on the GPU: attend's kernels in their keeping modes."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.attend.triton import launch_into, refuse
from longreach.ops.attend.triton_tuning import Tuning
from longreach.ops.attend.triton_wide import is_wide
from longreach.ops.selection import Selection, Spans
from longreach.ops.types import PLAIN_GROUP, PLAIN_WIDEST, KVView, Logits, Partial, Rows, ScoringKeys

DENSE = Spans.dense()


def attend_with_logits(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None,
    sink_logit: Tensor | None,
    tune: Tuning | None = None,
) -> tuple[Partial, Logits]:
    out, lse, kept = _keep(rows, kv, scale, softcap, sink_logit, True, tune)
    assert out is not None
    return Partial(out, lse), kept


def score_keys(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None,
    sink_logit: Tensor | None,
    keys: ScoringKeys | None = None,
    tune: Tuning | None = None,
) -> tuple[Tensor, Logits]:
    _, lse, kept = _keep(rows, kv, scale, softcap, sink_logit, False, tune, keys)
    return lse, kept


def _keep(
    rows: Rows,
    kv: KVView,
    scale: float,
    softcap: float | None,
    sink_logit: Tensor | None,
    values: bool,
    tune: Tuning | None,
    keys: ScoringKeys | None = None,
) -> tuple[Tensor | None, Tensor, Logits]:
    """(out [R, H, D] or None, lse [R, H], logits)."""
    refuse(rows, kv, DENSE, sink_logit)
    count, heads, dim = rows.q.shape
    if keys is not None and is_wide(dim, kv.group(rows)):
        raise Unsupported(
            f"score_keys' Triton kernel scores 8-bit keys of up to {PLAIN_WIDEST} channels a head (its sums are exact "
            f"up to there) and {PLAIN_GROUP} query heads a KV head, got {dim} and {kv.group(rows)}; score the keys "
            f"themselves, or use impl='reference'"
        )
    out = rows.q.new_empty((1, count, heads, dim), dtype=torch.float32) if values else None
    lse = rows.q.new_empty((1, count, heads), dtype=torch.float32)
    with torch.cuda.device_of(rows.q):
        kept = launch_into(rows, kv, DENSE, scale, softcap, sink_logit, None, tune, out, lse, write=True, keys=keys)
    assert kept is not None
    return None if out is None else out[0], lse[0], kept


def attend_from_logits(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    kept: Logits,
    *,
    sink_logit: Tensor | None,
    tune: Tuning | None = None,
) -> Partial:
    refuse(rows, kv, selection, sink_logit)
    if torch.is_grad_enabled() and kept.x.requires_grad:
        raise Unsupported(
            "attend's Triton kernels have no backward pass and logits require a gradient; use impl='reference', or "
            "torch.no_grad()"
        )
    count, heads, dim = rows.q.shape
    out = rows.q.new_empty((1, count, heads, dim), dtype=torch.float32)
    lse = rows.q.new_empty((1, count, heads), dtype=torch.float32)
    with torch.cuda.device_of(rows.q):
        launch_into(rows, kv, selection, 1.0, None, sink_logit, None, tune, out, lse, read=kept)
    return Partial(out[0], lse[0])
