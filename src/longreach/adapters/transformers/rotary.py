"""Queries and keys before rotation, for any model, without touching its code.

A hook notes the (cos, sin) that a layer gets. How the layer turns channels by them is found out once, by
running its projections on a few random tokens with no rotation and with a random one; it is then undone with
ops.rope. So a layer without rotation, or with one that ops.rope does not support, is found and refused.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from longreach.errors import Unsupported
from longreach.ops import rotate, unrotate
from longreach.ops.rope import Layout

LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")
Stored = Literal["halves", "adjacent", "once"]  # how the last dimension of cos holds a pair: a b a b, a a b b, a b
PROBE = 3  # tokens


class Captured(Exception):
    """Leaves a probed layer with its query, key and value."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, terms: dict[str, Any]):
        super().__init__()
        self.query, self.key, self.value, self.terms = query, key, value, terms


_PROBING: ContextVar[bool] = ContextVar("longreach_probing", default=False)


def probing() -> bool:
    """Whether a layer runs only to capture its query and key."""
    return _PROBING.get()


@dataclass(frozen=True)
class Rotation:
    """A layer's rotation: the layout of channels, and of pairs in cos and sin."""

    layout: Layout
    stored: Stored

    def pairs(self, x: Tensor) -> Tensor:
        """cos or sin as the model has it, [..., width] -> one entry a pair."""
        if self.stored == "once":
            return x
        return x[..., : x.shape[-1] // 2] if self.stored == "halves" else x[..., ::2]

    def undo(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, heads, T, D] rotated by the model -> unrotated. cos, sin: as the model has them, [1 or B, T, width]."""
        return unrotate(x, self.pairs(cos)[:, None], self.pairs(sin)[:, None], layout=self.layout)


def cos_sin(given: Any) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) of a layer's position_embeddings: such a pair, or cos + i sin (DeepSeek-V2); None for others."""
    if isinstance(given, Tensor) and given.is_complex():
        return given.real, given.imag
    return given if isinstance(given, tuple) and len(given) == 2 else None


def find_rotation(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rotation | str:
    """The rotation of the attention module, found with the arguments of its next call; or why it is unknown."""
    name = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    pair = cos_sin(kwargs["position_embeddings"])
    if pair is None:
        return f"{name} gets no pair (cos, sin) as position_embeddings"
    cos, width = pair[0], pair[0].shape[-1]
    generator = torch.Generator().manual_seed(0)
    still = (torch.ones(1, PROBE, width), torch.zeros(1, PROBE, width))
    try:
        before = _projected(module, args, kwargs, *still)
        for stored in ("halves", "adjacent", "once"):
            pairs = width if stored == "once" else width // 2
            if not 0 < 2 * pairs <= before.shape[-1]:
                continue
            angle = 6.0 * torch.rand(1, PROBE, pairs, generator=generator)
            turn = angle.cos(), angle.sin()
            after = _projected(module, args, kwargs, *(_store(t, stored) for t in turn))
            if _close(after, before):
                return f"{name} does not rotate its queries"
            for layout in LAYOUTS:
                turned = rotate(before, *(t[:, None].to(before) for t in turn), layout=layout)
                found = Rotation(layout, stored)
                if _close(after, turned):
                    same = torch.equal(_store(found.pairs(cos), stored), cos)
                    return found if same else f"{name} gets cos and sin that do not hold their pairs as it reads them"
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return f"{name} could not be asked how it rotates: {error}"
    if hasattr(module, "mla"):
        return f"{name} is MLA, which rotates its keys in part; use a method, or options of it, without this need"
    return f"{name} rotates channels in a layout longreach does not know; known: {', '.join(LAYOUTS)}"


def _store(x: Tensor, stored: Stored) -> Tensor:
    if stored == "halves":
        return torch.cat([x, x], -1)
    return x.repeat_interleave(2, -1) if stored == "adjacent" else x


def _projected(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cos: Tensor, sin: Tensor) -> Tensor:
    """The queries [1, H, PROBE, D] that the module makes of random hidden states, rotated by cos and sin."""
    hidden = args[0] if args else kwargs["hidden_states"]
    random = torch.randn(1, PROBE, hidden.shape[-1], generator=torch.Generator().manual_seed(1)).to(hidden)
    probe = dict(kwargs)
    if isinstance(probe.get("position_ids"), Tensor):
        probe["position_ids"] = torch.arange(PROBE, device=hidden.device)[None]
    if not args:
        probe["hidden_states"] = random
    return captured(module, (random, *args[1:]) if args else (), probe, cos, sin).query


@torch.no_grad()
def captured(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cos: Tensor, sin: Tensor) -> Captured:
    """The input of an attention module's attention with these arguments, if its rotation were cos and sin.

    Nothing is attended and nothing put into a cache. Raises Unsupported where it does not reach our attention.
    """
    like = kwargs["position_embeddings"]
    probe = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
    if isinstance(like, Tensor):
        probe["position_embeddings"] = torch.complex(cos.to(like.real), sin.to(like.real))
    else:
        probe["position_embeddings"] = (cos.to(like[0]), sin.to(like[0]))
    token = _PROBING.set(True)
    try:
        module.forward(*args, **probe)
    except Captured as found:
        return found
    finally:
        _PROBING.reset(token)
    raise Unsupported(f"{type(module).__name__} does not call longreach's attention")


def attention_modules(decoder: nn.Module) -> list[nn.Module]:
    """The attention modules: those with "Attention" in their class name and a `layer_idx`, and none of these within."""
    found = [
        module
        for module in decoder.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__
    ]
    inner = {id(module): {id(part) for part in module.modules()} for module in found}
    return [m for m in found if not any(id(x) in inner[id(m)] for x in found if x is not m)]  # DBRX wraps norms around


def _close(a: Tensor, b: Tensor) -> bool:
    few_digits = a.element_size() < 4  # bf16 cos and sin carry 3 digits
    return bool((a.float() - b.float()).norm() <= (0.03 if few_digits else 1e-4) * b.float().norm())
