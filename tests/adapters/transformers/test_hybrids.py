"""Hybrid models give transformers' own answers, and their recurrent state follows the cache or the call is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

import longreach
from longreach import CacheConfig, Chat, attach
from longreach.adapters.transformers import Answer, BatchReader, LongreachCache, Reader, inspect_model
from longreach.errors import InvalidInput, LongreachError, Unsupported
from longreach.methods.registry import METHODS
from longreach.testing.tiny import (
    EOS_ID,
    HYBRIDS,
    PAD_ID,
    SHAPE,
    from_config,
    random_tokens,
    save_tiny,
    tiny_model,
    tiny_tokenizer,
)  # fmt: skip
from tests.adapters.transformers.reference import (
    assert_same_answer,
    assert_same_steps,
    eager_batch,
    eager_one,
    generate,
    model_of,
    padded_batch,
    prompt,
)
from tests.tiers import swept

FIRST = (
    "qwen3_next",
    "falcon_h1",
    "jamba",
    "lfm2",
)  # delta rule; both in a layer; Mamba without rotation; convolutions
FAMILIES = swept([*FIRST, *(name for name in HYBRIDS if name not in FIRST)], 4)
FORGETFUL = ("jamba",)  # whose own state is lost in a second pass of several tokens
ATTENDING = {"falcon_h1": {0, 1}}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_sequence(family: str) -> None:
    assert_same_steps(family, ATTENDING.get(family, {1, 3}))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_exact_as_eager_ones(family: str) -> None:
    with attach(model_of(family)):
        got = generate(model_of(family), prompt())
    want = eager_one(family)
    assert torch.equal(got.tokens, want.answer.tokens)
    if "moe" not in family and family not in ("qwen3_next", "jamba"):  # rounding may turn the choice of an expert
        assert_same_answer(got, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_batch(family: str) -> None:
    tokens, mask = padded_batch()
    with attach(model_of(family), cache=CacheConfig("paged", page=8)):
        got = generate(model_of(family), tokens, mask)
    assert torch.equal(got.tokens, eager_batch(family).answer.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_in_chunks(family: str) -> None:
    tokens, mask = padded_batch()
    model = model_of(family)
    with attach(model):
        if family in FORGETFUL:
            with pytest.raises(Unsupported, match="takes no recurrent_states in a pass of several tokens"):
                generate(model, prompt(), prefill_chunk_size=7)
            return
        one = generate(model, prompt(), prefill_chunk_size=7)
        batch = generate(model, tokens, mask, prefill_chunk_size=13)
    assert torch.equal(one.tokens, eager_one(family).answer.tokens)
    assert torch.equal(batch.tokens, eager_batch(family).answer.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_longreach_generate(family: str) -> None:
    model, (tokens, mask) = model_of(family), padded_batch()
    want = model.generate(tokens, attention_mask=mask, max_new_tokens=24, do_sample=False)
    end = int(want[0, tokens.shape[1] + 9])  # some sequence ends early, and the cache goes on from there
    with attach(model) as session:
        got = longreach.generate(session, tokens, mask, max_new_tokens=24)
        assert torch.equal(got.sequences, want)
        assert got.captured is None and "recurrent layers" in str(got.not_captured_reason)
        cache = session.new_cache()
        part = longreach.generate(session, tokens[:1], max_new_tokens=24, eos_token_id=end, past_key_values=cache)
        assert int(part.tokens[0, -1]) == end and part.tokens.shape[1] <= 10
        rest = longreach.generate(session, part.sequences, max_new_tokens=4, past_key_values=cache)
        columns = part.sequences.shape[1]
        assert torch.equal(rest.tokens, want[:1, columns : columns + 4])
        with pytest.raises(Unsupported, match="recurrent layers, whose state the captured step does not hold"):
            longreach.generate(session, tokens, mask, max_new_tokens=4, graph=True)
    with attach(model, loop="captured"), pytest.raises(Unsupported, match="recurrent layers"):
        generate(model, prompt())


@pytest.mark.covering
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "jamba"])
@pytest.mark.parametrize("method", METHODS)
def test_decode_methods(family: str, method: str) -> None:
    """Every method attends to all keys of a short prompt, or is refused by name."""
    model = model_of(family)
    try:
        session = attach(model, decode=method)
    except LongreachError as refusal:
        assert method in str(refusal) or "rotary" in str(refusal)
        return
    with session:
        got = generate(model, prompt(), steps=8)
        rows = {r.layer: r.method for r in session.report().layers if r.phase == "decode"}
    assert rows.keys() == ATTENDING.get(family, {1, 3})
    assert got.tokens.shape == (1, 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_check_says_what_attach_does(family: str, tmp_path: Any) -> None:
    found = inspect_model(save_tiny(tmp_path, family))
    assert found.refused is None and found.shape is not None and found.shape.layers == 2
    assert found.recurrent == (2 if family != "nemotron_h" else 1)
    for method, reason in found.methods.items():
        try:
            attach(model_of(family), decode=method).close()
        except LongreachError as error:
            assert reason == str(error)
        else:
            assert reason is None


def test_memory_is_that_of_the_layers_that_attend(tmp_path: Any) -> None:
    found = inspect_model(save_tiny(tmp_path, "lfm2"))
    with attach(model_of("lfm2"), cache=CacheConfig(capacity=100)):
        held = model_of("lfm2")(random_tokens(2, 30)).past_key_values.kv.nbytes
    assert found.kv_bytes(100, batch=2, element=4) == held


# the state follows the cache


STATEFUL = ["qwen3_next", "falcon_h1", "bamba", "lfm2"]
Change = Callable[[Any, LongreachCache], None]


def read(model: Any, cache: LongreachCache, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, past_key_values=cache, use_cache=True, **more).logits


def _crop_the_last_pass(model: Any, cache: LongreachCache) -> None:
    read(model, cache, random_tokens(1, 5, seed=7))
    cache.crop(-5)


def _reset(model: Any, cache: LongreachCache) -> None:
    read(model, cache, random_tokens(1, 5, seed=7))
    cache.reset()
    read(model, cache, prompt())


def _empty_by_columns(model: Any, cache: LongreachCache) -> None:
    cache.drop_columns(cache.columns)
    read(model, cache, prompt())


def _rollback(model: Any, cache: LongreachCache) -> None:
    with cache.rollback():
        for n in range(3):
            read(model, cache, random_tokens(1, 1 + n, seed=n))


def _nested_rollback(model: Any, cache: LongreachCache) -> None:
    with cache.rollback():
        read(model, cache, random_tokens(1, 3))
        with cache.rollback():
            read(model, cache, random_tokens(1, 4))
            read(model, cache, random_tokens(1, 1))
        read(model, cache, random_tokens(1, 1))


def _failing_layer(model: Any, cache: LongreachCache) -> None:
    """The error comes after the recurrent layers of the pass have run."""
    _fail(model, cache, model.model.layers[-1])


def _failing_head(model: Any, cache: LongreachCache) -> None:
    _fail(model, cache, model.lm_head)


def _fail(model: Any, cache: LongreachCache, module: nn.Module) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = module.register_forward_hook(stop)
    try:
        for width in (4, 1):
            with pytest.raises(KeyboardInterrupt):
                read(model, cache, random_tokens(1, width, seed=8))
    finally:
        hook.remove()


def _failing_generate(model: Any, cache: LongreachCache) -> None:
    def stop(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    left = 4
    hook = model.lm_head.register_forward_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            longreach.generate(
                cache.owner, torch.cat([prompt(), prompt(6)], 1), max_new_tokens=9, past_key_values=cache
            )
    finally:
        hook.remove()


def _refused_crop(model: Any, cache: LongreachCache) -> None:
    assert not cache.can_drop(3)
    with pytest.raises(Unsupported, match=r"cannot be cut from \[40\] to \[37\] tokens.*cache.reset"):
        cache.crop(-3)
    assert cache.columns == 40 and cache.can_drop(40)


@pytest.mark.covering
@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize(
    "change",
    [
        _crop_the_last_pass, _reset, _empty_by_columns, _rollback, _nested_rollback, _failing_layer, _failing_head,
        _failing_generate, _refused_crop,
    ],
)  # fmt: skip
def test_the_cache_goes_on_as_if_nothing_had_been(family: str, change: Change) -> None:
    model, more = model_of(family), random_tokens(1, 6, seed=5)
    with attach(model, decode="quest") as session:
        cache, plain = session.new_cache(), session.new_cache()
        for each in (cache, plain):
            read(model, each, prompt())
        change(model, cache)
        assert cache.columns == plain.columns == 40 and cache.kv.lengths == [40] and cache.invalid is None
        for tokens in (more, more[:, :1], more[:, 1:2]):
            assert torch.equal(read(model, cache, tokens), read(model, plain, tokens))


@pytest.mark.parametrize("family", STATEFUL)
def test_snapshots_of_other_tokens_are_not_restored(family: str) -> None:
    """Within the block the sequence is cut below the snapshot and grows to the same length with other tokens."""
    model = model_of(family)
    with attach(model) as session:
        cache, plain = session.new_cache(), session.new_cache()
        with cache.rollback():
            pass
        read(model, cache, prompt())
        with cache.rollback():
            cache.reset()
            read(model, cache, prompt(seed=9))
        read(model, plain, prompt(seed=9))
        assert torch.equal(read(model, cache, prompt(3)), read(model, plain, prompt(3)))


def test_a_padded_batch_is_cropped_as_a_whole() -> None:
    model, (tokens, mask) = model_of("qwen3_next"), padded_batch()
    one = torch.ones(3, 1, dtype=torch.long)
    with attach(model) as session:
        cache, plain = session.new_cache(3), session.new_cache(3)
        for each in (cache, plain):
            read(model, each, tokens, attention_mask=mask)
        read(model, cache, tokens[:, -1:], attention_mask=torch.cat([mask, one], 1))
        cache.crop(-1)
        got, want = (read(model, c, tokens[:, :1], attention_mask=torch.cat([mask, one], 1)) for c in (cache, plain))
        assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["bamba", "falcon_h1"])
def test_eviction_leaves_the_state(family: str) -> None:
    """In the layers that attend keys go; with all of them kept the answer is the dense one."""
    model, want = model_of(family), eager_one(family).answer.tokens
    with attach(model, evict="snapkv capacity=40 window=4"):
        assert torch.equal(generate(model, prompt()).tokens, want)
    with attach(model, evict="snapkv capacity=16 window=4") as session:
        cache = session.new_cache()
        generate(model, prompt(), steps=8, past_key_values=cache)
        assert cache.kv.lengths == [47] and cache.kv.slots_in_use(0) == [16 + 7] and cache.kv.slots_in_use(1) == [23]


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_plans_are_made_of_a_prompt(family: str) -> None:
    """The residual stream is noted by the numbers of layers that attend."""
    model = model_of(family)
    with attach(model, decode="kascade") as session:
        generate(model, random_tokens(1, 2100), steps=4)
        (plan,) = session.report().plans
        assert plan.source == "prompt" and plan.file is not None, plan


def test_host_memory_is_reported_by_the_layers_of_the_model() -> None:
    model = model_of("qwen3_next")
    with attach(model, cache=CacheConfig(host=True)) as session:
        generate(model, prompt(), steps=4)
        memory = session.report().memory
        assert memory is not None and memory.host_layers == (1, 3)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_conversations(family: str) -> None:
    """A second turn goes on from the state of the first, or reads all again where the state cannot go on."""
    model, tokenizer = model_of(family), tiny_tokenizer(chat=True)
    with attach(model) as session:
        chat = Chat(session, tokenizer)
        for number, turn in enumerate(("What is the code?", "And the second one?")):
            ids = torch.tensor([chat._tokens([*chat.messages, {"role": "user", "content": turn}])])
            want = longreach.generate(session, ids, max_new_tokens=9, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
            reply = chat.ask(turn, max_new_tokens=9, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
            assert torch.equal(reply.made.tokens, want.tokens)
            assert reply.reused_tokens == 0 or (number and family not in FORGETFUL)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_questions_after_a_prompt(family: str) -> None:
    """Answers are rolled back, and the prompt is read in passes that the layers can take."""
    model, document, questions = model_of(family), prompt()[0].tolist(), random_tokens(2, 5, seed=6).tolist()
    with attach(model) as session:
        reader = Reader(session, chunk=16)
        reader.read(document)
        for question in (*questions, questions[0]):
            got = list(reader.ask(question, 8, (), Answer()))
            text = torch.tensor([[*document, *question]])
            assert got == longreach.generate(session, text, max_new_tokens=8).tokens[0].tolist()
        batch = BatchReader(session, chunk=16)
        logits = batch.read([document, questions[0]])
        for row, tokens in zip(logits, (document, questions[0]), strict=True):
            alone = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-3)


# what is refused


@pytest.mark.parametrize("family", STATEFUL)
def test_padding_that_would_enter_the_state_is_refused(family: str) -> None:
    model, tokens = model_of(family), random_tokens(2, 12)
    right = torch.ones(2, 12, dtype=torch.long)
    right[1, 8:] = 0
    inner = torch.ones(2, 12, dtype=torch.long)
    inner[1, 4:6] = 0
    with attach(model) as session:
        for mask in (right, inner):
            cache = session.new_cache(2)
            with pytest.raises(Unsupported, match="padding after its first token"):
                read(model, cache, tokens, attention_mask=mask)
            assert cache.columns == 0 and cache.invalid is None
            read(model, cache, tokens)
        with pytest.raises(Unsupported, match="one column with padding"):
            read(model, session.new_cache(2), tokens[:, :1], attention_mask=torch.tensor([[1], [0]]))
        with pytest.raises(Unsupported, match="padding between the tokens"):
            model(tokens, attention_mask=inner, use_cache=False)
        plain = model(tokens[1:, :8], use_cache=False).logits
        padded = model(tokens.masked_fill(right == 0, PAD_ID), attention_mask=right, use_cache=False).logits
        torch.testing.assert_close(padded[1:, :8], plain, rtol=1e-4, atol=1e-4)


def test_chunks_of_text_are_refused() -> None:
    with pytest.raises(Unsupported, match="recurrent layers: their state depends on all tokens before"):
        attach(model_of("lfm2"), fuse="full_reuse")


def test_calls_that_change_the_batch_are_refused_with_nothing_changed(tmp_path: Any) -> None:
    model = model_of("qwen3_next")
    with attach(model) as session:
        cache, plain = session.new_cache(2), session.new_cache(2)
        for each in (cache, plain):
            read(model, each, random_tokens(2, 9))
        for change in (
            lambda: cache.reorder_cache(torch.tensor([1, 0])),
            lambda: cache.batch_select_indices(torch.tensor([0])),
            lambda: cache.batch_repeat_interleave(2),
            cache.copy,
            lambda: cache.save(tmp_path / "cache.safetensors"),
            cache.activate_past_recording,
            lambda: cache.states.reset(torch.tensor([1])),
        ):
            with pytest.raises(Unsupported):
                change()
        with pytest.raises(InvalidInput, match="expected -n"):
            cache.crop(1)
        assert torch.equal(read(model, cache, random_tokens(2, 2)), read(model, plain, random_tokens(2, 2)))


REFUSED = {
    "minimax": ({"num_local_experts": 2}, "keep their state outside transformers' cache layers"),
    "recurrent_gemma": ({"lru_width": 64, "attention_window_size": 16}, "recurrent layers"),
    "zamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8}, "attention"),
    "mamba2": ({"num_heads": 8, "head_dim": 16}, "attention"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_whose_state_the_cache_cannot_hold(kind: str, tmp_path: Any) -> None:
    fields, reason = REFUSED[kind]
    config = AutoConfig.for_model(kind, **{**SHAPE, "num_hidden_layers": 4, **fields})
    with pytest.raises(Unsupported, match=reason) as refusal:
        attach(from_config(config))
    config.save_pretrained(tmp_path)
    assert inspect_model(tmp_path).refused == str(refusal.value)


def test_a_hybrid_without_rotation_is_refused_by_methods_that_need_it() -> None:
    """The config of Granite 4 has parameters of a rotation that its default lacks."""
    model = tiny_model("granitemoehybrid", position_embedding_type="nope")
    with pytest.raises(Unsupported, match="has no rotary embedding, and a method needs queries before rotation"):
        attach(model, decode="mac")
    with attach(model, decode="quest"):
        model(prompt())


def test_a_layer_that_attends_against_its_config_is_refused() -> None:
    model = tiny_model("lfm2")
    with attach(model) as session:
        session.facts.numbers = {1: 0}
        with pytest.raises(Unsupported, match="attends in layer 3, which has no keys"):
            model(prompt())
