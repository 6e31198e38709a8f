"""The tokens of a pass of a model under plain transformers: a hook on the decoder finds them, layers get them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longreach.adapters.transformers.attach import MARK
from longreach.adapters.transformers.cache_name import CACHE, renamed
from longreach.adapters.transformers.mka.attention import TOKENS, MemoryAttention
from longreach.adapters.transformers.mka.cache_layers import Held, held_in
from longreach.adapters.transformers.mka.levels import PASS, LevelsPass
from longreach.adapters.transformers.mka.rotation import frequencies_in
from longreach.adapters.transformers.rotary import attention_modules
from longreach.errors import InvalidInput, Unsupported
from longreach.mka.tokens import Tokens


def add_hook(decoder: nn.Module) -> None:
    """Let the decoder's passes describe their tokens to its layers."""
    remove_hook(decoder)
    decoder.register_forward_pre_hook(describe_tokens, with_kwargs=True)


def remove_hook(decoder: nn.Module) -> None:
    """Undo `add_hook`, also in a copy of the decoder."""
    for key in [k for k, hook in decoder._forward_pre_hooks.items() if hook is describe_tokens]:
        del decoder._forward_pre_hooks[key]
        decoder._forward_pre_hooks_with_kwargs.pop(key, None)


def describe_tokens(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass Tokens to the layers as a keyword, and positions of real tokens where none came, with padding or a past.

    A keyword, as gradient checkpointing repeats layers after other passes. In a longreach session the step has them.
    """
    given = {**dict(zip(_names(type(decoder).forward), args, strict=False)), **renamed(kwargs)}
    if MARK in decoder.__dict__:
        return (), _with_positions(given)
    ids = given.get("input_ids")
    ids = given.get("inputs_embeds") if ids is None else ids
    if not isinstance(ids, Tensor) or ids.dim() < 2 or not ids.shape[1]:
        raise InvalidInput("expected input_ids [B, T] or inputs_embeds [B, T, width] with at least one token")
    batch, length = ids.shape[:2]
    held = _held(decoder, given.get(CACHE), batch)
    past, columns, first = (None, 0, None) if held is None else (held.count, held.columns, held.first_position)
    mask = _mask(given.get("attention_mask"), batch, length, past, columns)
    positions = given.get("position_ids")
    if positions is not None and (not isinstance(positions, Tensor) or positions.dim() != 2):
        raise Unsupported(f"position_ids: MKA takes positions [1 or B, T], got {_kind(positions)}")
    tokens = Tokens.of((batch, length), ids.device, mask=mask, position_ids=positions, past=past, first_position=first)
    if positions is None and (past is not None or tokens.real is not None):
        given["position_ids"] = tokens.rectangle(tokens.rotary_pos)
    return (), {**given, TOKENS: tokens, **_for_levels(decoder, given.get("attention_mask"), tokens)}


def _with_positions(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a session's pass, with positions of real tokens where a mask came without any."""
    ids, mask = (given.get(name) for name in ("input_ids", "attention_mask"))
    ids = given.get("inputs_embeds") if ids is None else ids
    if given.get("position_ids") is not None or not isinstance(ids, Tensor) or not isinstance(mask, Tensor):
        return given
    return {**given, "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :].to(ids.device)}


def _for_levels(decoder: nn.Module, mask: Tensor | None, tokens: Tokens) -> dict[str, LevelsPass]:
    """The keyword for layers whose attention is `levels_attention`."""
    config = next(m for m in attention_modules(decoder) if isinstance(m, MemoryAttention)).mka.config
    if config.variant == "fastmka":
        return {}
    columns = None if mask is None or bool(mask.all()) else mask.to(tokens.seq.device).bool()
    return {PASS: LevelsPass(tokens, columns, frequencies_in(decoder) if config.turns_blocks else None)}


@functools.cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def _held(decoder: nn.Module, cache: Any, batch: int) -> Held | None:
    """What the first converted layer holds of the cache's tokens; None for an empty one."""
    if cache is None or not cache.get_seq_length():
        return None
    first = next(m for m in attention_modules(decoder) if isinstance(m, MemoryAttention))
    held = held_in(cache, int(first.layer_idx))  # type: ignore[call-overload]
    if len(held.count) != batch:
        raise InvalidInput(f"{CACHE} holds {len(held.count)} sequences, the input has {batch}")
    return held


def _mask(mask: Any, batch: int, length: int, past: Tensor | None, columns: int) -> Tensor | None:
    """The padding mask of the new tokens, checked against the cache's."""
    if mask is None:
        if past is not None and not bool((past == columns).all()):
            raise InvalidInput("attention_mask: left out, but the cache was filled with padding; pass the whole mask")
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise Unsupported(
            f"attention_mask: MKA takes 2-D padding masks [B, T], got {_kind(mask)}, which does not say what tokens a "
            f"sequence has; a static cache brings such a mask too: use the dynamic cache"
        )
    if tuple(mask.shape) != (batch, columns + length):
        of = f" ({columns} columns of the cache, {length} new)" if columns else ""
        raise InvalidInput(f"attention_mask: expected [{batch}, {columns + length}]{of}, got {list(mask.shape)}")
    if past is not None and not torch.equal(mask[:, :columns].to(past.device).bool().sum(1), past):
        raise InvalidInput("attention_mask: it masks other past columns than when they were cached")
    return mask[:, columns:]


def _kind(x: Any) -> str:
    return str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__
