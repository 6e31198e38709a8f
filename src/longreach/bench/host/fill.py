"""Fill a cache with random keys that SimHash samples as it samples a model's, layer by layer.

A layer is drawn in GPU memory and written to its place, which may be host memory. So the GPU holds one layer more than
the cache and its staging, never a copy of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import LongreachCache, shape_of
from longreach.adapters.transformers.synthetic import key_size
from longreach.bench.filled import note_layer
from longreach.bench.sampling_inputs import SPREAD, draw_sequence
from longreach.methods.base import AttentionMethod


def sampled_kv(model: Any, batch: int, tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each layer keys and values [B, tokens, G, D], drawn by `sampling_inputs.draw_sequence`.

    Keys are as large as it takes for a few of them to share most of a query's weight, as in `synthetic.kv_of`: this
    changes no angle. Queries are the model's own.
    """
    config = model.config
    draw = torch.Generator(model.device).manual_seed(seed)
    form = (batch, tokens, config.num_key_value_heads, config.head_dim)
    group = config.num_attention_heads // config.num_key_value_heads
    size = key_size(model, tokens) / math.sqrt(1 + SPREAD**2)
    for _ in range(config.num_hidden_layers):
        k, v = (torch.empty(form, dtype=model.dtype, device=model.device) for _ in "kv")
        for keys, values in zip(k, v, strict=True):
            draw_sequence(keys.transpose(0, 1), values.transpose(0, 1), group, draw)
        yield k.mul_(size), v


@torch.no_grad()
def fill_host(
    cache: LongreachCache, model: Any, method: AttentionMethod, tokens: int, seed: int, impl: str,
    now: Callable[[], float],
) -> dict[str, float]:  # fmt: skip
    """Fill an empty cache and make the method's state, each layer's as its last prompt pass would. Seconds of both.

    Raises CapacityError, before anything is drawn into the cache, if its memory cannot be had.
    """
    slots, shape = range(cache.batch), shape_of(model)
    append = cache.kv.begin(slots, [tokens] * cache.batch)
    seconds, started = {"fill": 0.0, "state": 0.0}, now()
    for layer, (k, v) in enumerate(sampled_kv(model, cache.batch, tokens, seed)):
        cache.kv.append(layer, append, k.flatten(0, 1), v.flatten(0, 1))
        filled = now()
        note_layer(cache, method, shape, layer, append, impl)
        seconds["fill"] += filled - started
        started = now()
        seconds["state"] += started - filled
    cache.kv.commit(append)
    cache.grow(tokens)
    cache.mark_observed((method,), [0] * cache.batch)
    return seconds
