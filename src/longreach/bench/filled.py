"""The state that a decode method would have made of a prompt, made of keys that were drawn."""

from __future__ import annotations

from dataclasses import replace

import torch

from longreach.adapters.transformers import LongreachCache
from longreach.cache import Append
from longreach.methods.base import AttentionMethod
from longreach.methods.call import LayerCall, ModelShape
from longreach.ops import RotaryFrequencies, Rows


@torch.no_grad()
def note_filled(cache: LongreachCache, method: AttentionMethod, model: ModelShape, impl: str = "auto") -> None:
    """Rebuild the state of `method` in each layer of a cache that was filled without a prompt.

    Without it, state that is made of the prompt's keys holds whatever its memory held before. State that is made of
    queries (MAC's ring) is made by the first decode call, with the first new token.
    """
    slots = range(cache.batch)
    step = cache.kv.begin(slots, [0 for _ in slots])
    for layer in range(model.layers):
        note_layer(cache, method, model, layer, step, impl)
    cache.kv.commit(step)
    cache.mark_observed((method,), [0] * cache.batch)


@torch.no_grad()
def note_layer(
    cache: LongreachCache, method: AttentionMethod, model: ModelShape, layer: int, step: Append, impl: str = "auto"
) -> None:
    """Rebuild the state of `method` in a layer that holds all keys of a pass, as at the end of a prompt.

    With keys in host memory, a pass that wrote more than a few of them has a copy in the GPU's memory, and the state is
    made from that; for another pass the keys are copied first. State that is made of queries is left out.
    """
    if not (method.observes_prompt and method.keeps == "tokens"):
        return
    view = cache.kv.view(layer, step)
    if layer in cache.kv.in_host and view.k is (cache.kv.memory[layer] or (None,))[0]:
        view = replace(view, k=view.k.clone(), calls=None)
    sequences = torch.arange(cache.batch, device=view.k.device)
    q = view.k.new_zeros((cache.batch, model.query_heads, model.head_dim))
    rows = Rows(q, sequences, view.seq_lens - 1)  # the last token of each sequence
    call = LayerCall(
        layer, rows, view, step.slots, model.head_dim**-0.5, model=model, impl=impl, phase="prefill",
        frequencies=lambda: _frequencies(model.head_dim, view.k.device),
    )  # fmt: skip
    state = cache.states.get(method, call)
    if state is not None:
        state.kept(layer, view)
        method.observe_prompt(call, state)


def _frequencies(dim: int, device: torch.device) -> RotaryFrequencies:
    """Those of a rotation of base 10,000, whatever the model's are: what a step costs does not depend on them."""
    return RotaryFrequencies(10_000.0 ** -(torch.arange(dim // 2, device=device) / (dim // 2)))
