"""A Llama of any size with random weights, and caches filled with random keys and values: for measuring speed.

A prompt of 128K tokens takes longer to read than its decoding takes to measure; the cost of a step does not depend
on the keys' values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from longreach.adapters.transformers.hf_cache import LongreachCache

SPREAD = 0.02  # standard deviation of weights
KEYS = 8  # about as many keys share most of a query's weight, so that a wrong read shows in the logits
# model, batch, tokens, seed -> keys and values [B, tokens, G, D] of each layer, as `kv_of` draws them
Draw = Callable[[PreTrainedModel, int, int, int], Iterator[tuple[Tensor, Tensor]]]


@torch.no_grad()
def random_llama(
    *, layers: int, hidden: int, feed_forward: int, vocabulary: int, heads: int, kv_heads: int, dim: int,
    dtype: torch.dtype, device: torch.device, seed: int,
) -> PreTrainedModel:  # fmt: skip
    """A Llama in eval mode, made and drawn on `device`: normal weights, norms of one, no end-of-text token."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=feed_forward, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=1 << 18,
        rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    draw = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, SPREAD, generator=draw)
    return model


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a decode step reads: all but the input embedding, of which it reads one row."""
    skipped = model.get_input_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not skipped)


def logit_spread(tokens: int) -> float:
    """Standard deviation of attention logits with which about KEYS of `tokens` keys share most of the weight."""
    return math.sqrt(max(math.log(tokens / KEYS), 0.0))


def key_size(model: PreTrainedModel, tokens: int) -> float:
    """Standard deviation of a key's numbers with which about KEYS of `tokens` keys share most of a query's weight."""
    return logit_spread(tokens) / (SPREAD * math.sqrt(model.config.hidden_size))


def kv_of(model: PreTrainedModel, batch: int, tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each layer keys and values [B, tokens, G, D]: the same for the same arguments.

    Keys are as long as it takes for about KEYS of them to share most of a query's weight.
    """
    config: Any = model.config
    draw = torch.Generator(model.device).manual_seed(seed)
    form = (batch, tokens, config.num_key_value_heads, config.head_dim)
    size = key_size(model, tokens)
    for _ in range(config.num_hidden_layers):
        k, v = (torch.empty(form, dtype=model.dtype, device=model.device).normal_(generator=draw) for _ in "kv")
        yield k.mul_(size), v


@torch.no_grad()
def fill(cache: LongreachCache, model: PreTrainedModel, tokens: int, seed: int) -> None:
    """Put `tokens` columns of `kv_of` into an empty cache of a session on the model."""
    append = cache.kv.begin(range(cache.batch), [tokens] * cache.batch)
    for layer, (k, v) in enumerate(kv_of(model, cache.batch, tokens, seed)):
        cache.kv.append(layer, append, k.flatten(0, 1), v.flatten(0, 1))
    cache.kv.commit(append)
    cache.grow(tokens)


@torch.no_grad()
def filled_dynamic_cache(
    model: PreTrainedModel, batch: int, tokens: int, seed: int, *, sequences: int | None = None,
    last: int | None = None, draw: Draw = kv_of,
) -> DynamicCache:  # fmt: skip
    """transformers' cache of any length, holding the columns of `draw`: by default those that `fill` puts.

    sequences: only that many first ones; last: only that many last columns. The rest takes no memory.
    """
    cache = DynamicCache(config=model.config)
    for layer, both in enumerate(draw(model, batch, tokens, seed)):
        k, v = (x[:sequences, tokens - (last or tokens) :].transpose(1, 2).clone() for x in both)
        cache.update(k, v, layer)
    return cache


@torch.no_grad()
def filled_static_cache(model: PreTrainedModel, batch: int, tokens: int, room: int, seed: int) -> StaticCache:
    """The cache that transformers makes for cache_implementation="static", holding the same columns as `fill` puts."""
    cache = StaticCache(config=model.config, max_cache_len=tokens + room)
    for layer, (k, v) in enumerate(kv_of(model, batch, tokens, seed)):
        cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)
    return cache
