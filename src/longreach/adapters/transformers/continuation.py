"""Whether recurrent layers take their state as the beginning of a pass of several tokens.

Some take it in passes of one token only (Jamba): they would read a later chunk of a prompt as if nothing came before.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from longreach.adapters.transformers.cache_name import CACHE, OLD
from longreach.adapters.transformers.hybrid import keeps_state
from longreach.errors import Unsupported

CACHES = ("cache_params", OLD, CACHE)  # parameters by which transformers' layers take their cache
TOKENS = 2  # of each pass
KINDS = ("conv_states", "recurrent_states")


@torch.no_grad()
def why_not_continued(decoder: nn.Module, config: Any) -> str | None:
    """Why a pass of several tokens cannot follow another one; None if it can.

    One layer of each class runs on random tokens, with states that differ. The same output means that it takes none.
    """
    for module in {type(m): m for m in decoder.modules() if keeps_state(type(m))}.values():
        kind = _ignored(module, config)
        if kind is not None:
            return f"{type(module).__name__} takes no {kind} in a pass of several tokens"
    return None


def check_continued(reason: str | None) -> None:
    """Raise Unsupported if there is a reason."""
    if reason is not None:
        raise Unsupported(
            f"{reason}, so it would forget the tokens before: read each text whole, in one pass into an empty cache "
            f"(no prefill_chunk_size, no second prompt in the same cache), or what follows one token at a time"
        )


def _ignored(module: nn.Module, config: Any) -> str | None:
    """The kind of state that the module does not take, else None."""
    name = next(n for n in inspect.signature(module.forward).parameters if n in CACHES)
    weight = next(p for p in module.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2 * TOKENS, config.hidden_size, generator=generator).to(weight.device, weight.dtype)

    def after(kind: str | None) -> Tensor | None:
        """The second pass, with this kind of state changed; None where the module keeps no such state."""
        cache = DynamicCache(config=config)
        module(x[:, :TOKENS], **{name: cache})
        states = getattr(cache.layers[int(module.layer_idx)], kind) if kind is not None else {}  # type: ignore[arg-type]
        held = [state for state in states.values() if state is not None]
        if kind is not None and not held:
            return None
        for state in held:
            state.add_(1)
        out: Tensor = module(x[:, TOKENS:], **{name: cache})
        return out

    want = after(None)
    assert want is not None
    for kind in KINDS:
        got = after(kind)
        if got is not None and torch.equal(got, want):
            return kind
    return None
