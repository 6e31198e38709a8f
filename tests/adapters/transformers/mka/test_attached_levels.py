"""MKA and Block-MKA with longreach attached: methods serve level 1 of `mka`, `block_mka` attends by itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import longreach
from longreach import CacheConfig, SnapKV, attach
from longreach.adapters.transformers import fingerprint
from longreach.adapters.transformers.prompt_reader import Answer, BatchReader, Reader
from longreach.cache import PerTokenState
from longreach.errors import Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.mac import MAC
from longreach.methods.oracle_top_k import OracleTopK
from longreach.methods.quest import Quest
from longreach.methods.streaming_llm import StreamingLLM
from longreach.testing.tiny import random_tokens
from tests.adapters.transformers.mka.models import SMALL, close, converted, levels_of
from tests.adapters.transformers.mka.test_attached import EXACT, NEW, Breaks
from tests.adapters.transformers.mka.test_levels import VARIANTS, each, made
from tests.adapters.transformers.reference import generate, padded_batch
from tests.tiers import swept

FIRST = ("mka", "gated", "block, hash")
some = pytest.mark.parametrize("name", swept([*FIRST, *(name for name in VARIANTS if name not in FIRST)], 3))
MKA = [name for name, (variant, _) in VARIANTS.items() if variant == "mka"]
BLOCK = [name for name in VARIANTS if name not in MKA]
CACHES = {
    "grows": CacheConfig(),
    "paged": CacheConfig("paged", page=8),
    "pages in blocks": CacheConfig("paged", page=2),
}


@each
@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
@pytest.mark.covering
def test_plain_tokens(name: str, config: CacheConfig) -> None:
    """A left-padded batch, in one pass and in chunks, by generate and by the decode loop."""
    model = made(name)
    tokens, mask = padded_batch((40, 23, 9))
    want = generate(model, tokens, mask, steps=NEW)
    with attach(model, cache=config) as session:
        got = generate(model, tokens, mask, steps=NEW)
        assert torch.equal(got.tokens, want.tokens)
        close(got.logits, want.logits, 1e-4)
        loop = longreach.generate(session, tokens, mask, max_new_tokens=NEW, prefill_chunk_size=7)
        assert torch.equal(loop.tokens, want.tokens)
        again = longreach.generate(session, tokens.flip(0), mask.flip(0), max_new_tokens=NEW)  # over the same cache
        assert torch.equal(again.tokens.flip(0), want.tokens)
    assert torch.equal(generate(model, tokens, mask, steps=NEW).logits, want.logits)


@pytest.mark.parametrize("name", ["mka", "block"])
@pytest.mark.parametrize("family", swept(["phi3", "qwen3", "glm4", "qwen3_moe"], 3))
def test_families(name: str, family: str) -> None:
    model, tokens = made(name, family), random_tokens(2, 33)
    want = generate(model, tokens, steps=6)
    with attach(model) as session:
        assert torch.equal(longreach.generate(session, tokens, max_new_tokens=6).tokens, want.tokens)


@pytest.mark.parametrize("name", MKA)
@pytest.mark.parametrize("method", EXACT.values(), ids=EXACT)
@pytest.mark.covering(method=type)
def test_every_method_serves_level_1(name: str, method: AttentionMethod) -> None:
    model = made(name)
    tokens, mask = padded_batch((40, 23))
    want = generate(model, tokens, mask, steps=NEW)
    with attach(model, decode=method) as session:
        got = generate(model, tokens, mask, steps=NEW)
        assert torch.equal(got.tokens, want.tokens)
        close(got.logits, want.logits, 1e-4)
        assert torch.equal(longreach.generate(session, tokens, mask, max_new_tokens=NEW).tokens, want.tokens)


@pytest.mark.parametrize("method", [StreamingLLM(window=8), OracleTopK(k=0.2), MAC(window=8, band=4, min_context=0)])
def test_sparse_methods_give_the_same_tokens_in_the_loop(method: AttentionMethod) -> None:
    model, tokens = made("mka"), random_tokens(1, 60)
    with attach(model, decode=method) as session:
        got = generate(model, tokens, steps=NEW)
        assert torch.equal(longreach.generate(session, tokens, max_new_tokens=NEW).tokens, got.tokens)
        assert method.name == "mac" or not torch.equal(got.tokens, generate(made("mka"), tokens, steps=NEW).tokens)


def test_reports_count_all_levels() -> None:
    """MKA reads two levels of keys and the recalled blocks; Block-MKA a window, summaries and recalled blocks."""
    tokens, shares = random_tokens(1, 60), {}
    for name, options in {"dense": ("mka", {"tiers": (1,)}), "two": ("mka", {"tiers": (1, 2)})}.items():
        model = converted("llama", options[0], **options[1])  # type: ignore[arg-type]
        with attach(model) as session:
            generate(model, tokens, steps=NEW)
            reports = [r for r in session.report().layers if r.phase == "decode"]
        shares[name] = sum(r.bytes_read for r in reports) / sum(r.dense_bytes for r in reports)
        assert {r.method for r in reports} == {"dense"}
    assert shares == {"dense": 1.0, "two": 2.0}
    model = made("block")
    with attach(model) as session:
        generate(model, tokens, steps=2)  # one decode step, of a row at position 60
        reports = [r for r in session.report().layers if r.phase == "decode"]
    vector = 2 * 16 * 4  # of both KV heads, fp32
    window, recalled, blocks = 60 - 52 + 1, 2 * 4, 13
    for report in reports:
        assert report.method == "block_mka" and report.dense_bytes == 2 * 61 * vector
        assert report.key_bytes == report.value_bytes == (window + recalled + blocks) * vector
        assert report.metadata_bytes == blocks * vector + 2 * 2 * 4  # codes, and entries of lists


@each
@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
@pytest.mark.covering
def test_an_answer_longer_than_the_first_memory(name: str, config: CacheConfig) -> None:
    model = made(name)
    tokens, mask = padded_batch((250, 31))
    want = generate(model, tokens, mask, steps=20)
    with attach(model, cache=config) as session:
        assert torch.equal(generate(model, tokens, mask, steps=20).tokens, want.tokens)
        assert torch.equal(longreach.generate(session, tokens, mask, max_new_tokens=20).tokens, want.tokens)


@some
@torch.no_grad()
def test_passes_without_a_cache(name: str) -> None:
    """Positions are found from the mask."""
    model = made(name)
    tokens, mask = padded_batch((43, 30))
    want = model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
    with attach(model):
        close(model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()], want)


@some
def test_gradients_flow_through_an_attached_pass(name: str) -> None:
    """Also where the pass fills a cache, which later passes continue."""
    model, tokens = made(name), random_tokens(1, 30)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    full = model(torch.cat([tokens, tokens[:, :5]], 1)).logits[:, 30:]
    with attach(model) as session:
        for cache in (None, session.new_cache(1)):
            model.zero_grad()
            model(tokens, labels=tokens, past_key_values=cache, use_cache=cache is not None).loss.backward()
            for parameter, x in model.named_parameters():
                if parameter in want:
                    torch.testing.assert_close(x.grad, want[parameter], rtol=1e-3, atol=1e-4, msg=parameter)
        with torch.no_grad():
            close(model(tokens[:, :5], past_key_values=cache).logits, full)


@some
def test_rollback(name: str) -> None:
    model, document = made(name), random_tokens(1, 33)[0].tolist()
    questions = [random_tokens(1, 5, seed=s)[0].tolist() for s in (7, 8)]
    with attach(model) as session:
        reader = Reader(session, chunk=9)
        reader.read(document)
        for question in (*questions, questions[0]):
            got = list(reader.ask(question, NEW, (), Answer()))
            alone = longreach.generate(session, torch.tensor([document + question]), max_new_tokens=NEW)
            assert got == alone.tokens[0].tolist()
        prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (30, 11, 2)]
        batch = BatchReader(session, chunk=8)
        logits = batch.read(prompts)
        first = batch.answer(logits, NEW, ())
        assert first.tokens == batch.answer(logits, NEW, ()).tokens


@some
@torch.no_grad()
def test_a_failed_pass_leaves_the_state_as_it_was(name: str) -> None:
    model, tokens = made(name), random_tokens(2, 40)
    with attach(model) as session:
        cache = session.new_cache(2)
        want, cuts = model(tokens, past_key_values=session.new_cache(2)).logits, [0, 13, 14, 22, 40]
        breaks, got = Breaks(model, 1, 0, 2, 4, 5, 7), list[Any]()
        for start, stop in pairwise(cuts):
            while len(got) < cuts.index(stop):
                try:
                    got.append(model(tokens[:, start:stop], past_key_values=cache).logits)
                except RuntimeError as error:
                    assert "broken" in str(error)
        breaks.hook.remove()
        assert breaks.count == 9
        close(torch.cat(got, 1), want)


@pytest.mark.parametrize("name", ["mka", "block", "block, hash", "recall alone"])
@torch.no_grad()
def test_states_of_blocks_that_are_made_late_are_the_same(name: str) -> None:
    """The state of a cache that holds tokens is computed from its keys."""
    model, tokens = made(name), random_tokens(2, 30)
    for config in (CacheConfig(), CacheConfig("paged", page=8)):
        with attach(model, cache=config) as session:
            cache = session.new_cache(2)
            model(tokens[:, :21], past_key_values=cache)
            blocks = {key: x for key, x in cache.states._model.items() if key != "means"}
            assert len(blocks) == 2 and all(isinstance(x, PerTokenState) for x in blocks.values())
            for key in blocks:
                del cache.states._model[key]
            got = model(tokens[:, 21:], past_key_values=cache).logits
            close(got, model(tokens, past_key_values=session.new_cache(2)).logits[:, 21:])


@some
@torch.no_grad()
def test_nan_in_one_sequence_stays_there(name: str) -> None:
    model, tokens = made(name), random_tokens(3, 30)
    embeds = model.get_input_embeddings()(tokens)
    with attach(model) as session:
        want = model(inputs_embeds=embeds, past_key_values=session.new_cache(3)).logits
        embeds[1, 4] = torch.nan
        cache = session.new_cache(3)
        got = torch.cat([model(inputs_embeds=x, past_key_values=cache).logits for x in embeds.split([15, 1, 14], 1)], 1)
        assert got[1, 4].isnan().all()
        close(got[[0, 2]], want[[0, 2]])
        cache.reset()
        clean = model.get_input_embeddings()(tokens)
        close(model(inputs_embeds=clean, past_key_values=cache).logits[1], want[1])


@pytest.mark.parametrize("name", BLOCK)
def test_block_mka_refuses_other_methods(name: str) -> None:
    model = made(name)
    match = "LlamaForCausalLM has block_mka layers, which choose their keys themselves: expected decode=None, got quest"
    with pytest.raises(Unsupported, match=match):
        attach(model, decode="quest")
    with pytest.raises(Unsupported, match="expected prefill=None, got streaming_llm"):
        attach(model, prefill="streaming_llm")
    with attach(model) as session:
        for change in (session.switch, session.prepare):
            with pytest.raises(Unsupported, match=match):
                change(Quest())
        generate(model, random_tokens(1, 9), steps=2)


@pytest.mark.parametrize("name", ["mka", "block"])
def test_what_needs_keys_alone_is_refused(name: str) -> None:
    model = made(name)
    with pytest.raises(Unsupported, match=r"mka layers, whose blocks need all keys; leave evict out"):
        attach(model, evict=SnapKV(capacity=8))
    with pytest.raises(Unsupported, match=r"mka layers: .* so those of a chunk cannot be stored and used elsewhere"):
        fingerprint(model)
    with pytest.raises(Unsupported, match="so those of a chunk cannot be stored"):
        attach(model, fuse="full_reuse")
    pages = CacheConfig("paged", page=6)  # blocks of 4 neither divide it nor are multiples
    with attach(model, cache=pages), pytest.raises(Unsupported, match="blocks of 4 keys neither divide pages of 6"):
        generate(model, random_tokens(1, 30), steps=2)


def test_layers_that_are_not_converted_attend_by_the_method() -> None:
    model, tokens = converted("llama", "mka", layers=[1], **SMALL), random_tokens(1, 40)
    assert list(levels_of(model)) == [1]
    want = generate(model, tokens, steps=NEW)
    with attach(model, decode=Quest(k=1.0)) as session:
        assert torch.equal(longreach.generate(session, tokens, max_new_tokens=NEW).tokens, want.tokens)


@torch.no_grad()
def test_cuts_that_are_refused() -> None:
    """Running means cannot be cut; the error has the variant's name."""
    model, tokens = made("mka"), random_tokens(1, 30)
    with attach(model) as session:
        cache = session.new_cache(1)
        model(tokens, past_key_values=cache)
        with pytest.raises(Unsupported, match="the state that mka keeps of earlier tokens cannot be cut from 30 to 25"):
            cache.crop(-5)


@each
@torch.no_grad()
def test_positions_that_begin_elsewhere(name: str) -> None:
    """Recall by codes of keys before rotation refuses them; other levels do not depend on where positions begin."""
    model, tokens = made(name), random_tokens(1, 33)
    positions = torch.arange(3, 36)[None]
    want = model(tokens, position_ids=positions).logits
    with attach(model) as session:
        for cached in (False, True):
            if levels_of(model)[0].config.unrotates:
                with pytest.raises(Unsupported, match="position_ids: recall by 'hash' and 'index' takes"):
                    model(tokens, position_ids=positions, use_cache=cached)
                cache = session.new_cache(1)
                model(tokens[:, :20], position_ids=positions[:, :20] - 3, past_key_values=cache)
                with pytest.raises(Unsupported, match="position_ids"):
                    model(tokens[:, 20:], position_ids=positions[:, 20:], past_key_values=cache)
            else:
                close(model(tokens, position_ids=positions, use_cache=cached).logits, want, 1e-4)
        close(model(tokens, position_ids=positions - 3).logits, model(tokens).logits)
