"""generate on an attached model: sampling, several turns, streaming, where the prompt ends, what is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StaticCache, TextIteratorStreamer

from longreach import StreamingLLM, attach
from longreach.errors import InvalidInput, Unsupported
from longreach.testing.tiny import PAD_ID, random_tokens, tiny_model, tiny_tokenizer
from tests.adapters.transformers.reference import generate, model_of, padded_batch, prompt


def test_sampling_with_a_seed_draws_the_same_tokens() -> None:
    model, (tokens, mask) = model_of("llama"), padded_batch()
    options = {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "num_return_sequences": 2, "steps": 24}
    torch.manual_seed(5)
    want = generate(model, tokens, mask, **options)
    with attach(model):
        torch.manual_seed(5)
        got = generate(model, tokens, mask, **options)
        other = generate(model, tokens, mask, **options)
    assert got.tokens.shape == (6, 24)
    assert torch.equal(got.tokens, want.tokens)
    assert not torch.equal(other.tokens, want.tokens)


def test_sequences_that_end_early_are_padded_like_eager() -> None:
    """Finished sequences go on being fed padding that counts as real; the others must not notice."""
    model, (tokens, mask) = model_of("llama"), padded_batch()
    first = generate(model, tokens, mask, steps=20).tokens[0, 7]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": int(first), "pad_token_id": PAD_ID}
    want = model.generate(tokens, attention_mask=mask, **options)
    with attach(model):
        got = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(got, want)
    assert (got[0] == PAD_ID).any() and not torch.equal(got[0], got[1])


def test_classifier_free_guidance_runs_its_own_cache_beside_ours() -> None:
    model = model_of("llama")
    options = {"guidance_scale": 1.5, "negative_prompt_ids": random_tokens(1, 11, seed=9), "steps": 16}
    want = generate(model, prompt(), **options)
    with attach(model) as session:
        got = generate(model, prompt(), **options)
        rows = {(r.phase, r.rows) for r in session.report().layers}
    assert torch.equal(got.tokens, want.tokens)
    assert rows == {("prefill", 40 + 11), ("decode", 2 * 15)}


def test_stop_strings() -> None:
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    free = model.generate(prompt(), **options)
    pieces = [tokenizer.decode(token) for token in free[0, 40:]]
    (stop, *_) = [text for text in pieces[8:] if text.isalpha() and text.isascii()]
    options |= {"stop_strings": [stop], "tokenizer": tokenizer}
    with attach(model):
        assert torch.equal(model.generate(prompt(), **options), free[:, : 41 + pieces.index(stop)])


def test_prompt_from_embeddings() -> None:
    model = model_of("llama")
    embeds = model.get_input_embeddings()(prompt())
    options = {"inputs_embeds": embeds, "max_new_tokens": 16, "do_sample": False}
    want = model.generate(**options)
    with attach(model) as session:
        assert torch.equal(model.generate(**options), want)
        assert {r.rows for r in session.report().layers if r.phase == "prefill"} == {40}


@pytest.mark.parametrize("tokens", [prompt(1), prompt(2)], ids=["1", "2"])
def test_prompts_of_one_and_two_tokens(tokens: torch.Tensor) -> None:
    model = model_of("mistral")
    want = generate(model, tokens, steps=24)
    with attach(model) as session:
        assert torch.equal(generate(model, tokens, steps=24).tokens, want.tokens)
        assert {(r.phase, r.rows) for r in session.report().layers} == {("prefill", tokens.shape[1]), ("decode", 23)}


@pytest.mark.parametrize("chunk", [None, 39, 8])
def test_the_prompt_is_prefill_and_only_the_answer_decodes(chunk: int | None) -> None:
    """Also where the last chunk of the prompt is a single token, which looks like a decode step."""
    with attach(model_of("llama"), decode=StreamingLLM(sinks=1, window=2)) as session:
        first = generate(model_of("llama"), prompt(), steps=5, prefill_chunk_size=chunk)
        rows = {(r.phase, r.method, r.rows, r.fraction < 0.2) for r in session.report().layers}
    assert rows == {("prefill", "dense", 40, False), ("decode", "streaming_llm", 4, True)}
    dense = generate(model_of("llama"), prompt(), steps=5)
    assert torch.allclose(first.logits[:, 0], dense.logits[:, 0], rtol=0, atol=1e-4)
    assert not torch.allclose(first.logits[:, 1:], dense.logits[:, 1:], rtol=0, atol=1e-1)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("cut", [0, 9])
def test_turns_share_a_cache_and_may_be_taken_back(family: str, cut: int) -> None:
    """Ask, go on with the answer and more, or crop the cache and ask otherwise: as from scratch each time."""
    model = model_of(family)
    with attach(model) as session:
        cache = session.new_cache()
        first = model.generate(prompt(), past_key_values=cache, max_new_tokens=12, do_sample=False)
        assert cache.get_seq_length() == 40 + 11
        cache.crop(-cut)
        second = torch.cat([first[:, : 52 - cut], random_tokens(1, 13, seed=8)], 1)
        got = model.generate(second, past_key_values=cache, max_new_tokens=12, do_sample=False)
        assert {r.rows for r in session.report().layers if r.phase == "decode"} == {22}
    assert torch.equal(got, model.generate(second, max_new_tokens=12, do_sample=False))


def test_a_second_turn_in_chunks() -> None:
    """Where transformers cannot do that (5.17 feeds the whole prompt again), it is an error and not an answer."""
    model = model_of("llama")
    with attach(model) as session:
        cache = session.new_cache()
        with torch.no_grad():
            model(prompt()[:, :10], past_key_values=cache)
        options = {"past_key_values": cache, "max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": 8}
        if Version(transformers.__version__) < Version("5.18"):
            with pytest.raises(InvalidInput, match=r"expected \[1, 18\] \(10 columns of the cache, 8 new\)"):
                model.generate(prompt(), **options)
            assert cache.columns == 10
            return
        got = model.generate(prompt(), **options)
    assert torch.equal(got, model.generate(prompt(), max_new_tokens=6, do_sample=False))


def test_a_prompt_that_ends_with_padding_is_refused_where_generate_finds_it_itself() -> None:
    """Without a mask generate takes padding tokens for padding."""
    tokens, _ = padded_batch((12, 5), right=True)
    with attach(model_of("llama")), pytest.raises(InvalidInput, match="pad on the left"):
        model_of("llama").generate(tokens, max_new_tokens=3, do_sample=False)


def test_padded_turns() -> None:
    """A batch goes on with a second turn of its own padding, between the first answer and the new question."""
    model, (tokens, mask), (more, seen) = model_of("llama"), padded_batch(), padded_batch((5, 2, 7))
    with attach(model) as session:
        cache = session.new_cache(3)
        first = model.generate(
            tokens, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False
        )  # the last token of the answer is not yet in the cache
        whole = torch.cat([first, more], 1)
        whole_mask = torch.cat([mask, mask.new_ones(3, 6), seen], 1)
        got = model.generate(
            whole, attention_mask=whole_mask, past_key_values=cache, max_new_tokens=8, do_sample=False
        )[:, whole.shape[1] :]
    for row in range(3):
        alone = whole[row][whole_mask[row].bool()][None]
        want = model.generate(alone, attention_mask=torch.ones_like(alone), max_new_tokens=8, do_sample=False)
        assert torch.equal(got[row], want[0, alone.shape[1] :])


def test_the_cache_comes_back_with_the_answer() -> None:
    model = model_of("llama")
    with attach(model) as session:
        out = model.generate(prompt(), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        assert out.past_key_values.owner is session
        more = torch.cat([out.sequences, prompt(3, seed=4)], 1)
        got = model.generate(more, past_key_values=out.past_key_values, max_new_tokens=8, do_sample=False)
    assert torch.equal(got, model.generate(more, max_new_tokens=8, do_sample=False))


def test_streaming_from_another_thread() -> None:
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    want = tokenizer.decode(model.generate(prompt(), max_new_tokens=16, do_sample=False)[0, 40:])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    with attach(model):
        options = {"max_new_tokens": 16, "do_sample": False, "streamer": streamer}
        worker = threading.Thread(target=model.generate, args=(prompt(),), kwargs=options)
        worker.start()
        said = "".join(streamer)
        worker.join()
    assert said == want and said


def test_sessions_one_after_the_other() -> None:
    model = model_of("llama")
    want = generate(model, prompt(), steps=8).tokens
    for _ in range(2):
        with attach(model, decode="streaming_llm"):
            generate(model, prompt(), steps=8)
        with attach(model):
            assert torch.equal(generate(model, prompt(), steps=8).tokens, want)


def test_without_a_cache() -> None:
    model = model_of("llama")
    want = generate(model, prompt(), steps=6).tokens
    with attach(model):
        assert torch.equal(generate(model, prompt(), steps=6, use_cache=False).tokens, want)
    same = StreamingLLM(sinks=1, window=2)
    with attach(model, prefill=same, decode=same):
        assert generate(model, prompt(), steps=6, use_cache=False).tokens.shape == (1, 6)
    with attach(model, decode=same), pytest.raises(InvalidInput, match=r"use_cache=False.*streaming_llm"):
        generate(model, prompt(), steps=6, use_cache=False)


def test_settings_of_the_generation_config_hold() -> None:
    model = model_of("llama")
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    want = model.generate(prompt(), config)
    with attach(model):
        assert torch.equal(model.generate(prompt(), config), want)
        beams = GenerationConfig(max_new_tokens=5, num_beams=2)
        with pytest.raises(Unsupported, match="num_beams=2"):
            model.generate(prompt(), beams)
        with pytest.raises(Unsupported, match="num_beams=2"):
            model.generate(prompt(), generation_config=beams)


def test_users_logits_processors_are_kept() -> None:
    class Only(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return torch.full_like(scores, -1.0).index_fill(1, torch.tensor([7]), 0.0)

    mine = [Only()]
    with attach(model_of("llama")):
        out = model_of("llama").generate(prompt(), max_new_tokens=3, do_sample=False, logits_processor=mine)
    assert out[0, 40:].tolist() == [7, 7, 7] and len(mine) == 1


@pytest.mark.parametrize("habit", ["hybrid", "static"])
def test_a_checkpoints_habit_of_another_cache_gives_way(habit: str) -> None:
    """Gemma's files say "hybrid"; nobody who calls generate asked for it."""
    model = tiny_model("gemma2")
    want = generate(model, prompt(), steps=8).tokens
    model.generation_config.cache_implementation = habit
    with attach(model) as session:
        assert torch.equal(generate(model, prompt(), steps=8).tokens, want)
        assert session.report().fraction("decode") == 1.0
    assert model.generation_config.cache_implementation == habit


def test_a_checkpoints_habit_of_beams_is_refused_and_can_be_overruled() -> None:
    model = tiny_model("llama")
    model.generation_config.num_beams = 4
    with attach(model):
        with pytest.raises(Unsupported, match="num_beams=4"):
            model.generate(prompt(), max_new_tokens=3)
        assert generate(model, prompt(), steps=3, num_beams=1).tokens.shape == (1, 3)


OTHER_SEARCHES = {
    "num_beams": 3,
    "assistant_model": object(),
    "prompt_lookup_num_tokens": 4,
    "assistant_early_exit": 1,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "force_words_ids": [[3]],
    "custom_generate": lambda *args, **kwargs: None,
    "cache_implementation": "static",
}


@pytest.mark.parametrize("name", OTHER_SEARCHES)
def test_other_searches_are_refused_by_name(name: str) -> None:
    model = model_of("llama")
    with attach(model), pytest.raises(Unsupported, match=name):
        model.generate(prompt(), max_new_tokens=4, **{name: OTHER_SEARCHES[name]})


@pytest.mark.parametrize("name", ["quantized", "offloaded", "paged"])
def test_other_caches_are_refused_by_name(name: str) -> None:
    model = model_of("llama")
    with attach(model), pytest.raises(Unsupported, match=name):
        model.generate(prompt(), max_new_tokens=4, cache_implementation=name)


@pytest.mark.parametrize("call", ["generate", "forward"])
@pytest.mark.parametrize("kind", ["static", "filled", "empty"])
def test_cache_objects_of_transformers_are_refused(call: str, kind: str) -> None:
    """An empty one too: the caller would find it empty after the call, and go on with nothing."""
    model = model_of("llama")
    cache = (
        StaticCache(config=model.config, max_cache_len=64) if kind == "static" else DynamicCache(config=model.config)
    )
    if kind == "filled":
        model(prompt(8), past_key_values=cache)
    with attach(model), pytest.raises(Unsupported, match=f"{type(cache).__name__}.*new_cache"):
        if call == "generate":
            model.generate(prompt(), past_key_values=cache, max_new_tokens=4)
        else:
            model(prompt(), past_key_values=cache)


def test_continuous_batching_is_refused_by_name() -> None:
    model = tiny_model("llama")
    with attach(model), pytest.raises(Unsupported, match="generate_batch"):
        model.generate_batch([[1, 2, 3]])
    assert "generate_batch" not in vars(model)
