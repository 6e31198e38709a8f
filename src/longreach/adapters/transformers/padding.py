"""Which tokens of a pass are real. transformers pads to a rectangle; longreach's rows and cache are ragged.

Padding is never stored and never counts: in sliding windows too, a sequence is what it would be alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.errors import InvalidInput, Unsupported


def real_tokens(
    mask: Tensor | None,
    position_ids: Tensor | None,
    batch: int,
    length: int,
    cache: LongreachCache | None,
    *,
    trusted: bool = False,
    axes: bool = False,
) -> tuple[Tensor | None, list[int]]:
    """(bool [B, T] of real new tokens, None where all are; their number per sequence).

    mask: transformers' 2-D padding mask [B, past + T] or None; position_ids: [1 or B, T] or None, or with `axes`, of a
    multimodal rotary embedding, [axes, 1 or B, T].
    trusted: the new tokens are known to be real and the mask to be the cache's: generate, past its prompt, adds
    ones. They are then not looked at, so that decoding needs no device sync.
    Raises InvalidInput, Unsupported where mask, positions and cache contradict each other.
    """
    past = 0 if cache is None else cache.columns
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise Unsupported(f"attention_mask: longreach takes 2-D padding masks [B, T] only, got {shape}")
        if tuple(mask.shape) != (batch, past + length):
            of = f" ({past} columns of the cache, {length} new)" if past else ""
            raise InvalidInput(f"attention_mask: expected [{batch}, {past + length}]{of}, got {list(mask.shape)}")
    if trusted:
        return None, [length] * batch
    if mask is None:
        if cache is not None and cache.padded:
            raise InvalidInput("attention_mask: left out, but the cache was filled with padding; pass the whole mask")
        _check_positions(position_ids, None, batch, axes)
        return None, [length] * batch
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise Unsupported("attention_mask: longreach takes masks of 0 and 1 only")
    whole = mask.bool()
    if cache is not None and past and not torch.equal(whole[:, :past].cpu(), cache.column_mask()):
        raise InvalidInput("attention_mask: it masks other past columns than when they were cached")
    real = whole[:, past:]
    everything = bool(real.all())
    _check_positions(position_ids, None if everything else real, batch, axes)
    return (None, [length] * batch) if everything else (real, real.sum(1).tolist())


def _check_positions(position_ids: Tensor | None, real: Tensor | None, batch: int, axes: bool) -> None:
    """Positions must go up by one from token to token: packed sequences restart theirs and would be mixed up."""
    if position_ids is None:
        return
    if axes and position_ids.dim() == 3:  # for text all axes are the same
        same = (position_ids == position_ids[:1]).all(0)
        if not bool((same if real is None else same.expand(batch, -1) | ~real).all()):
            raise Unsupported(
                "position_ids differ by axis, as those of images and videos do; longreach reads prompts of text alone"
            )
        position_ids = position_ids[0]
    if position_ids.dim() != 2:
        raise Unsupported(f"position_ids: expected [B, T], got {list(position_ids.shape)}")
    follows = position_ids[:, 1:] - position_ids[:, :-1] == 1
    if real is not None:
        follows = follows.expand(batch, -1) | ~(real[:, 1:] & real[:, :-1])
    if not bool(follows.all()):
        raise Unsupported("position_ids do not go up by one from token to token (packed sequences?)")
