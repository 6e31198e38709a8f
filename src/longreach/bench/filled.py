"""The state that a decode method would have made of a prompt, made of keys that were drawn."""

from __future__ import annotations

import torch

from longreach.adapters.transformers import LongreachCache
from longreach.methods.base import AttentionMethod
from longreach.methods.call import LayerCall, ModelShape
from longreach.ops import Rows


@torch.no_grad()
def note_filled(cache: LongreachCache, method: AttentionMethod, model: ModelShape) -> None:
    """Rebuild the state of `method` in each layer of a cache that was filled without a prompt.

    Without it, state that is made of the prompt's keys holds whatever its memory held before. State that is made of
    queries (MAC's ring) is made by the first decode call, with the first new token.
    """
    slots = range(cache.batch)
    step = cache.kv.begin(slots, [0 for _ in slots])
    of_keys = method.observes_prompt and method.keeps == "tokens"
    for layer in range(model.layers if of_keys else 0):
        view = cache.kv.view(layer, step)
        none = view.seq_lens.new_zeros(1)
        rows = Rows(view.k.new_zeros((1, model.query_heads, model.head_dim)), none, none)
        call = LayerCall(layer, rows, view, step.slots, model.head_dim**-0.5, model=model)
        state = cache.states.get(method, call)
        if state is not None:
            state.kept(layer, view)
    cache.kv.commit(step)
    cache.mark_observed((method,), [0] * cache.batch)
