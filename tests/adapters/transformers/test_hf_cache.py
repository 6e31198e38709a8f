"""The cache that generate uses: no copy of the KV per step, crop, reset, growth, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from longreach import CacheConfig, attach
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.errors import CalledOutside, CapacityError, InvalidInput, Unsupported
from longreach.testing.tiny import tiny_model
from tests.adapters.transformers.reference import model_of, padded_batch, prompt


def _places(cache: LongreachCache) -> list[int]:
    return [x.data_ptr() for pair in cache.kv.memory for x in pair]


@pytest.mark.parametrize(
    "config",
    [CacheConfig(capacity=80), CacheConfig("paged", capacity=80, page=16, pages=5)],
    ids=["contiguous", "paged"],
)
@torch.no_grad()
def test_steps_write_in_place(config: CacheConfig) -> None:
    """K and V stay where they are, of the size they have, and every step writes one slot of them."""
    model = model_of("llama")
    with attach(model, cache=config) as session:
        cache = session.new_cache()
        model(prompt(), past_key_values=cache)
        places, size = _places(cache), cache.kv.nbytes
        assert size == 2 * 2 * 80 * 2 * 16 * 4  # layers, K and V, tokens, heads, channels, bytes
        for n in range(24):
            before = copy.deepcopy(cache.kv.memory)
            model(prompt(1, seed=n), past_key_values=cache)
            assert _places(cache) == places and cache.kv.nbytes == size
            pairs = [pair for old, new in zip(before, cache.kv.memory) for pair in zip(old, new)]
            # memory that was never written may hold NaN
            changed = [((a != b) & ~(a.isnan() & b.isnan())).any(-1).sum() for a, b in pairs]
            assert changed == [2, 2, 2, 2]  # one slot of two heads


@torch.no_grad()
def test_generate_keeps_its_memory() -> None:
    model, seen = model_of("llama"), []
    with attach(model, cache=CacheConfig(capacity=64)) as session:
        cache = session.new_cache()
        session.on_layer = lambda phase, call, outcome: seen.append((call.layer, call.kv.k.data_ptr()))
        model.generate(prompt(), past_key_values=cache, max_new_tokens=24, do_sample=False)
    assert len(seen) == 48 and len(set(seen)) == 2


ROOM: dict[str, dict[str, Any]] = {  # 300 tokens of prompt; all but the last of the answer's are kept
    "max_new_tokens": {"max_new_tokens": 60},
    "chunks": {"max_new_tokens": 60, "prefill_chunk_size": 90},
    "config": {"generation_config": GenerationConfig(max_new_tokens=60)},
    "max_length": {"max_length": 360},
    "embeddings": {"max_new_tokens": 60},
}


@pytest.mark.covering
@pytest.mark.parametrize("how", ROOM)
@pytest.mark.parametrize("given", [True, False])
def test_generate_makes_room_for_prompt_and_answer_at_once(how: str, given: bool) -> None:
    """Memory is allocated once, of the size that is needed, and never copied."""
    model, tokens, seen = model_of("llama"), prompt(300), set()
    inputs = {"inputs_embeds": model.model.embed_tokens(tokens)} if how == "embeddings" else {"inputs": tokens}
    with attach(model) as session:
        cache = session.new_cache() if given else None
        session.on_layer = lambda phase, call, outcome: seen.add((call.layer, call.kv.k.data_ptr(), call.kv.capacity))
        with torch.no_grad():
            model.generate(**inputs, **ROOM[how], past_key_values=cache, do_sample=False)
    assert len(seen) == 2 and {capacity for _, _, capacity in seen} == {359}
    if cache is not None:
        assert cache.kv.generation <= 1 and cache.columns == 359  # once before there was any memory


def test_nothing_is_copied_where_the_limit_is_generates_own() -> None:
    model = model_of("llama")
    with attach(model) as session:
        cache = session.new_cache()
        model.generate(prompt(250), past_key_values=cache, do_sample=False)  # 20 tokens
        assert cache.columns == cache.kv.layouts[0].pages.size == 269


def test_a_paged_batch_gets_its_pages_at_once() -> None:
    model, (tokens, mask) = model_of("llama"), padded_batch((300, 30))
    with attach(model, cache=CacheConfig("paged", page=16)) as session:
        cache = session.new_cache(2)
        seen = set()
        session.on_layer = lambda phase, call, outcome: seen.add((call.layer, call.kv.k.data_ptr()))
        model.generate(tokens, attention_mask=mask, past_key_values=cache, max_new_tokens=280, do_sample=False)
        assert len(seen) == 2 and cache.kv.layouts[0].pages.total == 37 + 20  # pages of 579 and of 309 tokens
        assert cache.kv.lengths == [579, 309]


def test_an_answer_that_goes_on_in_the_same_cache_makes_it_grow() -> None:
    model = model_of("llama")
    want = model.generate(prompt(250), max_new_tokens=50, do_sample=False)
    with attach(model) as session:
        cache = session.new_cache()
        first = model.generate(prompt(250), past_key_values=cache, max_new_tokens=20, do_sample=False)
        assert (cache.kv.layouts[0].pages.size, cache.kv.generation) == (269, 1)
        whole = torch.ones_like(first)
        got = model.generate(first, attention_mask=whole, past_key_values=cache, max_new_tokens=30, do_sample=False)
        assert (cache.kv.layouts[0].pages.size, cache.kv.generation) == (2 * 269, 2)
    assert torch.equal(got, want)


def test_a_size_the_user_fixed_stays() -> None:
    """More than fits may be asked for: the answer may end before."""
    model, anything = model_of("llama"), [*range(264)]
    for config in (CacheConfig(capacity=64), CacheConfig("paged", capacity=64, page=16), CacheConfig("paged", pages=2)):
        with attach(model, cache=config) as session:
            cache = session.new_cache()
            model.generate(prompt(), past_key_values=cache, max_new_tokens=500, eos_token_id=anything)
            assert cache.columns == 40 and cache.kv.generation == 0


def test_a_full_cache_is_an_error_before_anything_is_written() -> None:
    model = model_of("llama")
    with attach(model, cache=CacheConfig(capacity=44)) as session:
        cache = session.new_cache()
        with pytest.raises(CapacityError, match="holds 44 tokens"):
            model.generate(prompt(), past_key_values=cache, max_new_tokens=24, do_sample=False)
        assert cache.columns == 0 and cache.kv.lengths == [0]
        got = model.generate(prompt(), past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(got, model.generate(prompt(), max_new_tokens=5, do_sample=False))


@torch.no_grad()
def test_crop_counts_columns_and_reset_empties() -> None:
    model, (tokens, mask) = model_of("llama"), padded_batch((12, 5))
    with attach(model) as session:
        cache = session.new_cache(2)
        model(tokens, attention_mask=mask, past_key_values=cache)
        assert cache.get_seq_length() == 12 and cache.kv.lengths == [12, 5]
        cache.crop(0)
        assert cache.columns == 12
        cache.crop(-8)  # all five tokens of the second sequence among them
        assert cache.columns == 4 and cache.kv.lengths == [4, 0]
        with pytest.raises(InvalidInput, match="holds 4 columns, cannot drop 5"):
            cache.crop(-5)
        with pytest.raises(InvalidInput, match="expected -n"):
            cache.crop(2)
        cache.reset()
        assert cache.columns == 0 and cache.kv.lengths == [0, 0] and not cache.padded
        want = model(tokens, attention_mask=mask, past_key_values=session.new_cache(2)).logits
        assert torch.equal(model(tokens, attention_mask=mask, past_key_values=cache).logits, want)


@torch.no_grad()
def test_a_cropped_batch_goes_on_as_if_the_tokens_had_never_been() -> None:
    model, (tokens, mask) = model_of("mistral"), padded_batch((30, 18))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with attach(model, cache=CacheConfig("paged", page=8)) as session:
        cache = session.new_cache(2)
        model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache)
        cache.crop(-7)
        last = {"input_ids": tokens[:, 23:], "position_ids": positions[:, 23:]}
        got = model(**last, attention_mask=mask, past_key_values=cache).logits
    want = model(tokens, attention_mask=mask, position_ids=positions).logits[:, 23:]
    assert torch.allclose(got, want, rtol=0, atol=1e-4)


@torch.no_grad()
def test_inference_mode_may_come_and_go() -> None:
    model = model_of("llama")
    want = model(torch.cat([prompt(), prompt(2)], 1)).logits[:, -1]
    with attach(model) as session:
        cache = session.new_cache()
        with torch.inference_mode():
            model(prompt(), past_key_values=cache)
        model(prompt(1, seed=1), past_key_values=cache)
        with torch.inference_mode():
            got = model(prompt(2)[:, 1:], past_key_values=cache).logits[:, -1]
        assert session.report().fraction("decode") == 1.0
    assert cache.kv.lengths == [42] and got.shape == want.shape


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("beam search", lambda cache: cache.reorder_cache(torch.tensor([0]))),
        ("offloading", lambda cache: cache.layers[0].offload()),
        ("offloading", lambda cache: cache.layers[0].prefetch()),
    ],
)
def test_what_the_cache_cannot_do_it_refuses(what, call) -> None:
    with attach(model_of("llama")) as session, pytest.raises(Unsupported, match=what):
        call(session.new_cache())


def test_a_cache_of_another_session_is_refused() -> None:
    model, other = model_of("llama"), tiny_model("llama", seed=3)
    with attach(model) as session, attach(other):
        foreign = session.new_cache()
        with pytest.raises(InvalidInput, match="belongs to another session"):
            other(prompt(), past_key_values=foreign)
        with pytest.raises(InvalidInput, match="belongs to another session"):
            other.generate(prompt(), past_key_values=foreign, max_new_tokens=2)
    with pytest.raises(CalledOutside):
        model(prompt(), past_key_values=foreign)
    with attach(model), pytest.raises(InvalidInput, match="belongs to another session"):
        model(prompt(), past_key_values=foreign)
