"""Which tokens of a pass are real. transformers pads to a rectangle; longreach's rows and cache are ragged."""

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
    device: torch.device,
) -> tuple[Tensor | None, list[int]]:
    """(bool [B, T] of real new tokens, None where all are; their number per sequence).

    mask: transformers' 2-D padding mask [B, past + T] or None; position_ids: [1 or B, T] or None.
    On a GPU a pass of one token is taken to be real without a look, so that decoding needs no sync.
    Raises InvalidInput, Unsupported where mask, positions and cache contradict each other.
    """
    past = 0 if cache is None else cache.columns
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise Unsupported("attention_mask: longreach takes 2-D padding masks [B, T] only")
    if mask is not None and tuple(mask.shape) != (batch, past + length):
        raise InvalidInput(f"attention_mask: expected [{batch}, {past + length}], got {list(mask.shape)}")
    look = device.type == "cpu" or length > 1
    if not look or mask is None:
        if look:
            _check_positions(position_ids, None, batch, length)
        return None, [length] * batch
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise Unsupported("attention_mask: longreach takes masks of 0 and 1 only")
    whole = mask.bool()
    if cache is not None and past and not torch.equal(whole[:, :past].cpu(), cache.column_mask()):
        raise InvalidInput("attention_mask: it masks other past columns than when they were cached")
    real = whole[:, past:]
    everything = bool(real.all())
    _check_positions(position_ids, None if everything else real, batch, length)
    return (None, [length] * batch) if everything else (real, real.sum(1).tolist())


def _check_positions(position_ids: Tensor | None, real: Tensor | None, batch: int, length: int) -> None:
    """Positions must go up by one from token to token: packed sequences restart theirs and would be mixed up."""
    if position_ids is None or length < 2 or position_ids.dim() != 2:
        return
    step = position_ids[:, 1:] - position_ids[:, :-1]
    follows = step == 1
    if real is not None:
        follows = follows.expand(batch, -1) | ~(real[:, 1:] & real[:, :-1])
    if not bool(follows.all()):
        raise Unsupported("position_ids do not go up by one from token to token (packed sequences?)")
