"""Check, once per layer, that the model's own eager attention is the formula that longreach computes.

What a model's own eager attention takes from its module (sinks, soft caps, temperatures) and not from a keyword
would otherwise be lost in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longreach.errors import Unsupported

TOLERANCE = 1e-3  # of outputs of size 1; a missing term shows at 1e-2 and more, eager rounds to fp32


@torch.no_grad()
def check_attention(module: nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
    """Raise Unsupported unless the module's eager attention is softmax(softcap(scale q.k), sink) v on random inputs.

    query [B, H, T, D] and key [B, G, T, D] give head counts and device; kwargs: what the model passes to attention.
    """
    name, heads, dim = type(module).__name__, query.shape[1], query.shape[3]
    eager = _own_eager(module)
    if eager is None:
        raise Unsupported(f"{name} has no eager_attention_forward to compare with, so its formula is unknown")
    generator = torch.Generator().manual_seed(0)  # of its own: the user's sampling keeps its seed

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(query.device)

    q, k, v = 2 * random(1, heads, 3, dim), 2 * random(1, key.shape[1], 5, dim), random(1, key.shape[1], 5, dim)
    hidden = torch.ones(3, 5, dtype=torch.bool, device=query.device).triu(3)
    mask = torch.zeros(1, 1, 3, 5, dtype=q.dtype, device=query.device).masked_fill(hidden, torch.finfo(q.dtype).min)
    given = {n: x for n, x in kwargs.items() if n not in ("dropout", "output_attentions")}
    try:
        theirs = eager(module, q, k, v, mask, **{**given, "dropout": 0.0})[0].double()
    except Exception as error:
        raise Unsupported(f"{name}'s eager attention failed when longreach checked its formula: {error}") from error
    ours = _definition(q, k, v, mask, kwargs)
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=0.0, atol=TOLERANCE):
        raise Unsupported(
            f"{name} computes attention by a formula of its own: its eager attention differs from "
            f"softmax(scale q.k) v with the soft cap and sinks that it passes"
        )


def _own_eager(module: nn.Module) -> Callable[..., Any] | None:
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    return None


def _definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kwargs: dict[str, Any]) -> Tensor:
    scale, cap, sink = (kwargs.get(name) for name in ("scaling", "softcap", "s_aux"))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    x = (q @ k.transpose(2, 3)) * (q.shape[3] ** -0.5 if scale is None else scale)
    x = x if cap is None else cap * torch.tanh(x / cap)
    x = x + mask
    if sink is not None:
        x = torch.cat([x, sink.to(x).view(1, -1, 1, 1).expand(1, -1, x.shape[2], 1)], -1)
    return (x.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)
