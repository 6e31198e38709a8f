"""A converted model with longreach attached: every method, the decode loop, rollback, and what its memory refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import longreach
from longreach import CacheConfig, SnapKV, attach
from longreach.adapters.transformers import Precompute, fingerprint
from longreach.adapters.transformers.prompt_reader import Answer, BatchReader, Reader
from longreach.cache.mix_state import MixState
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.dense import Dense
from longreach.methods.mac import MAC
from longreach.methods.magicpig import MagicPIG
from longreach.methods.quest import Quest
from longreach.methods.streaming_llm import StreamingLLM
from longreach.ops.triton_launches import observe_launches
from longreach.testing.tiny import random_tokens
from tests.adapters.transformers.mka.models import HASH, RECALL, THREE, TWO, close, converted, levels_of, original
from tests.adapters.transformers.reference import generate, padded_batch
from tests.methods.cases import CASES
from tests.ops.attend.kernels import PLACE
from tests.tiers import swept

EACH = pytest.mark.parametrize("options", [TWO, THREE, HASH, RECALL], ids=["two", "three", "hash", "recall"])
SOME = pytest.mark.parametrize("options", swept([THREE, TWO, HASH, RECALL], 1))
NEW = 12
NEEDS_PLAN = ("kascade", "loki")
EXACT = {name: case.everything for name, case in CASES.items() if name not in NEEDS_PLAN}
EXACT["mac"] = MAC(window=16, band=4, min_context=1000)  # tiny models repeat tokens, whose rows it would reuse


@EACH
@pytest.mark.parametrize("method", EXACT.values(), ids=EXACT)
@pytest.mark.covering(method=type)
def test_every_method_gives_plain_tokens(options: dict[str, Any], method: AttentionMethod) -> None:
    """A left-padded batch, in one pass and in chunks, by generate and by the decode loop."""
    model = converted(**options)
    tokens, mask = padded_batch((40, 23, 9))
    want = generate(model, tokens, mask, steps=NEW)
    with attach(model, decode=method) as session:
        got = generate(model, tokens, mask, steps=NEW)
        assert torch.equal(got.tokens, want.tokens)
        close(got.logits, want.logits, 1e-4)
        loop = longreach.generate(session, tokens, mask, max_new_tokens=NEW, prefill_chunk_size=7)
        assert torch.equal(loop.tokens, want.tokens)
        again = longreach.generate(session, tokens.flip(0), mask.flip(0), max_new_tokens=NEW)  # over the same cache
        assert torch.equal(again.tokens.flip(0), want.tokens)
    assert torch.equal(generate(model, tokens, mask, steps=NEW).logits, want.logits)


@pytest.mark.parametrize(("variant", "kernel"), [("fastmka", "route_fuse"), ("mka", "few")])
def test_kernels_decode_as_the_reference(variant: str, kernel: str) -> None:
    """Each layer computes the session level of a decode step in one kernel."""
    tokens, mask = padded_batch((40, 23))
    found, launches = list[torch.Tensor](), list[str]()
    for impl, place in (("reference", "cpu"), ("triton", PLACE)):
        model = converted("llama", variant, tiers=(1, 2)).to(place)
        with attach(model, impl=impl) as session, observe_launches(lambda x: launches.append(x.function.__name__)):
            steps = {"max_new_tokens": 5, "graph": False, "compile": "none"}
            found.append(longreach.generate(session, tokens.to(place), mask.to(place), **steps).tokens.cpu())
    assert torch.equal(*found)
    assert launches.count(kernel) == 4 * 2  # steps and layers


@pytest.mark.parametrize("method", [StreamingLLM(window=8), Quest(k=0.2), MAC(window=8, band=4, min_context=0)])
def test_sparse_methods_give_the_same_tokens_in_the_loop(method: AttentionMethod) -> None:
    model, tokens = converted(), random_tokens(1, 60)
    with attach(model, decode=method) as session:
        got = generate(model, tokens, steps=NEW)
        assert torch.equal(longreach.generate(session, tokens, max_new_tokens=NEW).tokens, got.tokens)


@EACH
@pytest.mark.parametrize("name", ["qwen3_moe", "phi3", "glm4"])
@pytest.mark.covering
def test_families(options: dict[str, Any], name: str) -> None:
    model, tokens = converted(name, **options), random_tokens(2, 33)
    want = generate(model, tokens, steps=6)
    with attach(model) as session:
        assert torch.equal(longreach.generate(session, tokens, max_new_tokens=6).tokens, want.tokens)


@EACH
@pytest.mark.covering
@pytest.mark.parametrize(
    "config", [CacheConfig(), CacheConfig("paged", page=6), CacheConfig(capacity=300)], ids=["grows", "paged", "fixed"]
)
def test_an_answer_longer_than_the_first_memory(options: dict[str, Any], config: CacheConfig) -> None:
    model = converted(**options)
    tokens, mask = padded_batch((250, 31))
    want = generate(model, tokens, mask, steps=20)
    with attach(model, cache=config) as session:
        got = generate(model, tokens, mask, steps=20)
        assert torch.equal(got.tokens, want.tokens)
        first = longreach.generate(session, tokens[:, -40:], mask[:, -40:], max_new_tokens=3)
        got_loop = longreach.generate(session, tokens, mask, max_new_tokens=20)
    assert torch.equal(got_loop.tokens, want.tokens) and first.tokens.shape == (2, 3)


@EACH
@torch.no_grad()
def test_passes_without_a_cache(options: dict[str, Any]) -> None:
    model = converted(**options)
    tokens, mask = padded_batch((30, 12))
    want = model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
    with attach(model):
        close(model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()], want)


def test_gradients_flow_through_an_attached_pass() -> None:
    model, tokens = converted(**THREE), random_tokens(1, 30)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with attach(model):
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        if name in want:
            assert torch.allclose(parameter.grad, want[name], atol=1e-4), name
    for levels in levels_of(model).values():
        grad = levels.router.gate.bias.grad
        assert grad is not None and grad.all()


@SOME
def test_rollback(options: dict[str, Any]) -> None:
    """Two questions to one document, each longer than the passes that a memory keeps, give what they give alone."""
    model, document = converted(**options), random_tokens(1, 33)[0].tolist()
    questions = [random_tokens(1, 5, seed=s)[0].tolist() for s in (7, 8)]
    with attach(model, decode="quest") as session:
        reader = Reader(session, chunk=9)
        reader.read(document)
        for question in (*questions, questions[0]):
            answer = Answer()
            got = list(reader.ask(question, NEW, (), answer))
            alone = longreach.generate(session, torch.tensor([document + question]), max_new_tokens=NEW)
            assert got == alone.tokens[0].tolist()


@SOME
def test_batches_are_answered_twice(options: dict[str, Any]) -> None:
    model = converted(**options)
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (30, 11, 2)]
    with attach(model) as session:
        reader = BatchReader(session, chunk=8)
        logits = reader.read(prompts)
        first = reader.answer(logits, NEW, ())
        assert first.tokens == reader.answer(logits, NEW, ()).tokens
        reader.read([p[::-1] for p in prompts])
        assert first.tokens == reader.answer(reader.read(prompts), NEW, ()).tokens
        for prompt, tokens in zip(prompts, first.tokens, strict=True):
            assert longreach.generate(session, torch.tensor([prompt]), max_new_tokens=NEW).tokens[0].tolist() == list(
                tokens
            )


class Breaks:
    """Fails in a layer's output projection, in the passes of these numbers."""

    def __init__(self, model: Any, layer: int, *passes: int):
        self.passes, self.count = passes, 0
        self.hook = model.model.layers[layer].self_attn.o_proj.register_forward_hook(self)

    def __call__(self, *given: Any) -> None:
        self.count += 1
        if self.count - 1 in self.passes:
            raise RuntimeError("broken")


@EACH
@pytest.mark.covering
@pytest.mark.parametrize("layer", [0, 1])
@torch.no_grad()
def test_a_failed_pass_leaves_the_memory_as_it_was(options: dict[str, Any], layer: int) -> None:
    model, tokens = converted(**options), random_tokens(2, 40)
    with attach(model) as session:
        cache = session.new_cache(2)
        want, cuts = model(tokens, past_key_values=session.new_cache(2)).logits, [0, 13, 14, 22, 40]
        breaks, got = Breaks(model, layer, 0, 2, 4, 5, 7), []
        for start, stop in pairwise(cuts):
            while True:
                try:
                    got.append(model(tokens[:, start:stop], past_key_values=cache).logits)
                    break
                except RuntimeError as error:
                    assert "broken" in str(error)
        breaks.hook.remove()
        assert cache.kv.lengths == [40, 40] and breaks.count == 9
        close(torch.cat(got, 1), want)


def test_a_failed_answer_is_rolled_back() -> None:
    """Past the passes that are kept, too: the loop takes a snapshot of a cache that it continues."""
    model, tokens = converted(**THREE), random_tokens(1, 30)
    with attach(model) as session:
        want = longreach.generate(session, tokens, max_new_tokens=20).tokens
        cache = session.new_cache(1)
        longreach.generate(session, tokens[:, :20], max_new_tokens=1, past_key_values=cache)
        breaks = Breaks(model, 1, 15)
        with pytest.raises(RuntimeError, match="broken"):
            longreach.generate(session, tokens, max_new_tokens=20, past_key_values=cache)
        breaks.hook.remove()
        assert cache.columns == 20 and cache.invalid is None
        assert torch.equal(longreach.generate(session, tokens, max_new_tokens=20, past_key_values=cache).tokens, want)


@torch.no_grad()
def test_cuts_that_are_refused() -> None:
    model, tokens = converted(), random_tokens(1, 40)
    with attach(model) as session:
        cache = session.new_cache(1)
        model(tokens[:, :20], past_key_values=cache)
        model(tokens[:, 20:30], past_key_values=cache)
        with pytest.raises(
            Unsupported, match="that fastmka keeps of earlier tokens cannot be cut from 30 to 25 tokens: expected 0, a"
        ):
            cache.crop(-5)
        assert cache.columns == 30 and cache.kv.lengths == [30]
        cache.crop(-10)
        got = model(tokens[:, 20:], past_key_values=cache).logits
        close(got, model(tokens, past_key_values=session.new_cache(1)).logits[:, 20:])
        with cache.rollback():
            for n in range(12):
                model(tokens[:, n : n + 1], past_key_values=cache)
        assert cache.columns == 40
        cache.reset()
        close(model(tokens, past_key_values=cache).logits[:, 20:], got)


def test_an_end_within_an_answer() -> None:
    model, tokens = converted(), random_tokens(2, 25)
    with attach(model) as session:
        free = longreach.generate(session, tokens, max_new_tokens=NEW)
        end = int(free.tokens[0, 4])
        cache = session.new_cache(2)
        got = longreach.generate(session, tokens, max_new_tokens=NEW, eos_token_id=end, pad_token_id=0)
        kept = longreach.generate(
            session, tokens, max_new_tokens=NEW, eos_token_id=end, pad_token_id=0, past_key_values=cache
        )
    plain = model.generate(tokens, max_new_tokens=NEW, eos_token_id=end, pad_token_id=0, do_sample=False)
    assert torch.equal(got.sequences, plain) and torch.equal(kept.sequences, plain)


def test_eviction_keeps_the_memory() -> None:
    """Positions and memory count all tokens, whatever keys are kept."""
    model, tokens = converted(**THREE), random_tokens(1, 60)
    with attach(model, evict=SnapKV(capacity=24, window=4)) as session:
        got = generate(model, tokens, steps=NEW)
        loop = longreach.generate(session, tokens, max_new_tokens=NEW)
        assert torch.equal(loop.tokens, got.tokens)
        state = next(iter(session.static_caches.values())).states._model["means"]
        assert isinstance(state, MixState) and int(state.count.max()) == 60 + NEW - 1
    want = generate(model, tokens, steps=NEW).tokens
    assert not torch.equal(got.tokens, want)
    with attach(model, evict=SnapKV(capacity=64, window=4)):
        assert torch.equal(generate(model, tokens, steps=NEW).tokens, want)


def test_keys_in_host_memory() -> None:
    model, tokens = converted(**THREE), random_tokens(1, 40)
    want = generate(model, tokens, steps=NEW).tokens
    with attach(model, cache=CacheConfig(host=True)) as session:
        assert torch.equal(longreach.generate(session, tokens, max_new_tokens=NEW).tokens, want)


def test_the_chunk_store_and_fusion_are_refused() -> None:
    model = converted()
    match = "LongreachMKALlamaForCausalLM has fastmka layers: its keys depend on the tokens before"
    with pytest.raises(Unsupported, match=match):
        fingerprint(model)
    with pytest.raises(Unsupported, match=match):
        attach(model, fuse="full_reuse")
    with attach(model) as session:
        with pytest.raises(Unsupported, match=match):
            Precompute(session)
        generate(model, random_tokens(1, 9), steps=2)


@torch.no_grad()
def test_caches_of_others_are_refused() -> None:
    model, tokens = converted(), random_tokens(1, 12)
    with attach(original("llama")) as other:
        foreign = other.new_cache(1)
        original("llama")(tokens, past_key_values=foreign)
        with attach(model), pytest.raises(InvalidInput, match="belongs to another session"):
            model(tokens, past_key_values=foreign)
    with pytest.raises(Unsupported, match="layer 0 of this LongreachCache is a _Layer"):
        model(tokens, past_key_values=foreign)


@torch.no_grad()
def test_a_cache_without_the_models_state() -> None:
    model, tokens = converted(), random_tokens(1, 12)
    with attach(model) as session:
        cache = session.new_cache(1)
        model(tokens, past_key_values=cache)
        cache.states._model.clear()
        with pytest.raises(InvalidInput, match="the cache holds 12 tokens of which this model keeps no state"):
            model(tokens, past_key_values=cache)


def test_methods_that_observe_prompts_switch() -> None:
    model, tokens = converted(), random_tokens(1, 50)
    with attach(model, decode=Dense()) as session:
        session.prepare(Quest(k=1.0), MagicPIG(bits=0))
        reader = BatchReader(session)
        logits = reader.read([tokens[0].tolist()])
        want = reader.answer(logits, NEW, ()).tokens
        for method in (Quest(k=1.0), MagicPIG(bits=0), Dense()):
            session.switch(method)
            assert reader.answer(logits, NEW, ()).tokens == want
