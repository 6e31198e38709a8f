"""FastMKA in transformers' own cache: it follows reordering, selection and copies, and refuses the rest by name."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from longreach.adapters.transformers.mka import convert
from longreach.errors import CalledOutside, InvalidInput, Unsupported
from longreach.testing.tiny import random_tokens
from tests.adapters.transformers.mka.models import HASH, RECALL, THREE, TWO, close, converted, original
from tests.adapters.transformers.reference import padded_batch

EACH = pytest.mark.parametrize("options", [TWO, THREE, HASH, RECALL], ids=["two", "three", "hash", "recall"])


def filled(model: Any, tokens: Tensor, **given: Any) -> Any:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, past_key_values=cache, **given)
    return cache


@torch.no_grad()
def after(model: Any, cache: Any, tokens: Tensor, **given: Any) -> Tensor:
    return model(tokens, past_key_values=cache, **given).logits


@EACH
@torch.no_grad()
def test_a_left_padded_batch_in_chunks_equals_each_alone(options: dict[str, Any]) -> None:
    """The first chunks of the shortest sequence are padding alone. Positions are found from the mask, or given."""
    model = converted(**options)
    tokens, mask = padded_batch((33, 20, 6))
    alone = [model(tokens[b : b + 1, mask[b].bool()], use_cache=False).logits[0] for b in range(3)]
    for positions in (None, (mask.cumsum(1) - 1).clamp(min=0)):
        cache, parts = DynamicCache(config=model.config), []
        cuts = [0, 12, 20, 28, *range(29, 34)]
        for a, b in pairwise(cuts):
            given = {} if positions is None else {"position_ids": positions[:, a:b]}
            parts.append(model(tokens[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, **given).logits)
        for b, want in enumerate(alone):
            close(torch.cat(parts, 1)[b, mask[b].bool()], want)


@EACH
@torch.no_grad()
def test_a_right_padded_batch(options: dict[str, Any]) -> None:
    model = converted(**options)
    tokens, mask = padded_batch((33, 20, 6), right=True)
    got = model(tokens, attention_mask=mask).logits
    for b in range(3):
        close(got[b, mask[b].bool()], model(tokens[b : b + 1, mask[b].bool()]).logits[0])


@EACH
def test_generate_equals_recomputation(options: dict[str, Any]) -> None:
    model = converted(**options)
    tokens, mask = padded_batch((21, 12))
    got = model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for b in range(2):
        text = tokens[b : b + 1, mask[b].bool()]
        for _ in range(12):
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(got[b, -12:], text[0, -12:])


@EACH
def test_beam_search_reorders_the_memory(options: dict[str, Any]) -> None:
    model, tokens = converted(**options), random_tokens(2, 17)
    with_cache = model.generate(tokens, max_new_tokens=9, num_beams=3, do_sample=False)
    without = model.generate(tokens, max_new_tokens=9, num_beams=3, do_sample=False, use_cache=False)
    assert torch.equal(with_cache, without)


@EACH
def test_the_memory_follows_the_batch(options: dict[str, Any]) -> None:
    model, tokens, then = converted(**options), random_tokens(3, 21), random_tokens(3, 4, seed=5)
    want = after(model, filled(model, tokens), then)
    order = torch.tensor([2, 0, 0])
    cache = filled(model, tokens)
    cache.reorder_cache(order)
    close(after(model, cache, then[order]), want[order])
    cache = filled(model, tokens)
    cache.batch_select_indices(order)
    close(after(model, cache, then[order]), want[order])
    cache = filled(model, tokens)
    cache.batch_repeat_interleave(2)
    close(after(model, cache, then.repeat_interleave(2, 0)), want.repeat_interleave(2, 0))


@EACH
def test_a_copy_of_a_cache_goes_its_own_way(options: dict[str, Any]) -> None:
    model, tokens, then = converted(**options), random_tokens(2, 21), random_tokens(2, 4, seed=5)
    cache = filled(model, tokens)
    other = copy.deepcopy(cache)
    want = after(model, cache, then)
    after(model, other, random_tokens(2, 7, seed=6))
    close(after(model, filled(model, tokens), then), want)
    cache.reset()
    assert not cache.get_seq_length()
    close(after(model, cache, tokens), model(tokens).logits)


def test_a_lazily_made_cache_works() -> None:
    model, tokens = converted(), random_tokens(1, 12)
    cache = DynamicCache()
    got = torch.cat([after(model, cache, tokens[:, :7]), after(model, cache, tokens[:, 7:])], 1)
    close(got, model(tokens).logits)


def test_crop() -> None:
    model, tokens = converted(), random_tokens(1, 12)
    cache = filled(model, tokens)
    cache.crop(0)
    with pytest.raises(Unsupported, match="crop: the memory that fastmka keeps of 12 columns cannot be cut to 9"):
        cache.crop(-3)
    close(after(model, copy.deepcopy(cache), tokens), model(torch.cat([tokens, tokens], 1)).logits[:, 12:])
    cache.crop(-12)
    close(after(model, cache, tokens), model(tokens).logits)
    with pytest.raises(Unsupported, match="crop"):  # assisted generation removes tokens that it had guessed
        model.generate(tokens[:, :4].repeat(1, 3), max_new_tokens=9, prompt_lookup_num_tokens=2)


def test_a_cache_of_another_model() -> None:
    model, tokens = converted(), random_tokens(1, 12)
    with pytest.raises(
        InvalidInput, match=r"layer 0 holds 12 columns, of which this model has seen 0 \(a cache of anot"
    ):
        after(model, filled(original("llama"), tokens), tokens)
    other = converted(layers=[1])
    with pytest.raises(InvalidInput, match="layer 0 holds 12 columns, of which this model has seen 0"):
        after(model, filled(other, tokens), tokens)
    with pytest.raises(InvalidInput, match="a model with other options of MKA filled it"):
        after(model, filled(converted(summary="mean"), tokens), tokens)


def test_a_cache_that_others_have_changed() -> None:
    model, tokens = converted(), random_tokens(1, 12)
    cache = filled(model, tokens)
    after(original("llama"), cache, tokens)
    with pytest.raises(InvalidInput, match="layer 0 holds 24 columns, of which this model has seen 12"):
        after(model, cache, tokens)
    cache = filled(model, tokens)
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, :-1]
    with pytest.raises(InvalidInput, match="layer 0 holds 11 columns, of which this model has seen 12"):
        after(model, cache, tokens)


def test_a_failed_pass_is_found() -> None:
    """transformers leaves such a cache with more keys in some layers than in others."""
    model, tokens = converted(), random_tokens(1, 12)
    cache = filled(model, tokens)

    def fail(*given: Any) -> None:
        raise RuntimeError("no")

    hook = model.model.layers[0].self_attn.o_proj.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        after(model, cache, tokens)
    hook.remove()
    assert cache.layers[0].get_seq_length() == 24 and cache.layers[1].get_seq_length() == 12
    with pytest.raises(InvalidInput, match=r"layers hold \[12, 24\] columns, not all the same \(a pass failed\?\)"):
        after(model, cache, tokens)


def test_other_caches_are_refused() -> None:
    model, tokens = converted(), random_tokens(1, 12)
    static = StaticCache(config=model.config, max_cache_len=40)
    with pytest.raises(Unsupported, match="layer 0 of this StaticCache is a StaticLayer"):
        after(model, static, tokens)
    with pytest.raises(Unsupported, match=r"attention_mask: MKA takes 2-D padding masks \[B, T\], got \[1, 1, 12, 1"):
        model.generate(tokens, max_new_tokens=3, cache_implementation="static")
    windows = DynamicCache(config=convert(copy.deepcopy(original("llama")), "fastmka").config)
    windows.layers[0].__class__ = type("OwnLayer", (type(windows.layers[0]),), {})
    with pytest.raises(Unsupported, match="layer 0 of this DynamicCache is a OwnLayer"):
        after(model, windows, tokens)
    fields = {"get_seq_length": 0, "get_mask_sizes": (12, 0), "get_query_offset": 0}
    calls = {name: lambda *args, value=value: value for name, value in fields.items()}
    with pytest.raises(Unsupported, match="MKA takes a DynamicCache, got Odd"):
        after(model, type("Odd", (), {**calls, "layers": [], "is_sliding": []})(), tokens)


def test_offloaded_layers_keep_their_memory() -> None:
    model, tokens, then = converted(), random_tokens(1, 12), random_tokens(1, 3, seed=4)
    want = after(model, filled(model, tokens), then)
    cache = filled(model, tokens)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    close(after(model, cache, then), want)


@pytest.mark.parametrize("options", [TWO, THREE], ids=["two", "three"])
@torch.no_grad()
def test_nan_in_one_sequence_stays_there(options: dict[str, Any]) -> None:
    model, tokens = converted(**options), random_tokens(3, 20)
    embeds = model.get_input_embeddings()(tokens)
    want = model(inputs_embeds=embeds).logits
    embeds[1, 4] = torch.nan
    cache = DynamicCache(config=model.config)
    got = torch.cat([model(inputs_embeds=x, past_key_values=cache).logits for x in embeds.split([15, 1, 4], 1)], 1)
    assert got[1, 4:].isnan().all()
    close(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("options", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("how", ["eager", "sdpa"])
@torch.no_grad()
def test_padding_that_is_nan_changes_nothing(options: dict[str, Any], how: str) -> None:
    model = converted(**options)
    model.set_attn_implementation(how)
    tokens, mask = padded_batch((25, 9))
    embeds = model.get_input_embeddings()(tokens)
    want = model(inputs_embeds=embeds, attention_mask=mask).logits[mask.bool()]
    embeds[mask == 0] = torch.nan
    got = model(inputs_embeds=embeds, attention_mask=mask).logits[mask.bool()]
    assert torch.equal(got, want)


def test_masks_and_positions_that_are_refused() -> None:
    model, tokens = converted(), random_tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    with pytest.raises(
        Unsupported, match=r"attention_mask: MKA takes 2-D padding masks \[B, T\], got \[2, 1, 12, 12\]"
    ):
        model(tokens, attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool))
    with pytest.raises(Unsupported, match="got dict"):
        converted("qwen3")(tokens, attention_mask={"full_attention": None})
    with pytest.raises(InvalidInput, match=r"attention_mask: expected \[2, 12\], got \[2, 11\]"):
        model(tokens, attention_mask=mask[:, 1:])
    with pytest.raises(Unsupported, match=r"position_ids: MKA takes positions \[1 or B, T\], got \[3, 2, 12\]"):
        model(tokens, position_ids=torch.zeros(3, 2, 12, dtype=torch.long))
    with pytest.raises(InvalidInput, match="position_ids: expected to ascend by 1"):
        model(tokens, position_ids=torch.arange(12)[None] * 2)
    padded = mask.clone()
    padded[0, :3] = 0
    cache = filled(model, tokens, attention_mask=padded)
    longer = torch.ones(2, 13, dtype=torch.long)
    with pytest.raises(InvalidInput, match="attention_mask: left out, but the cache was filled with padding"):
        after(model, cache, tokens[:, :1])
    with pytest.raises(InvalidInput, match="it masks other past columns than when they were cached"):
        after(model, cache, tokens[:, :1], attention_mask=longer)
    with pytest.raises(InvalidInput, match=r"attention_mask: expected \[2, 13\] \(12 columns of the cache, 1 new\)"):
        after(model, cache, tokens[:, :1], attention_mask=mask)
    with pytest.raises(InvalidInput, match=r"(past_key_values|cache) holds 2 sequences, the input has 1"):
        after(model, cache, tokens[:1, :1])
    with pytest.raises(InvalidInput, match="expected input_ids"):
        model()
    longer[0, :3] = 0
    assert after(model, cache, tokens[:, :1], attention_mask=longer).shape == (2, 1, 264)


def test_a_layer_alone_is_refused() -> None:
    model = converted()
    with pytest.raises(CalledOutside, match="LongreachMKALlamaAttention was called without the tokens of a pass"):
        model.model.layers[0](torch.zeros(1, 3, 64), position_embeddings=None)
