"""model.generate of an attached model by captured steps: transformers' own tokens, and where its own loop stays.

Steps are captured in pieces on the CPU (`FakeGraph`), or in a CUDA graph on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, TextIteratorStreamer

from longreach import CacheConfig, attach
from longreach.adapters.transformers.loop import decoder as decoding
from longreach.adapters.transformers.loop import run as running
from longreach.errors import UnknownName, Unsupported
from longreach.testing.tiny import PAD_ID, random_tokens, tiny_model, tiny_tokenizer
from tests.adapters.transformers.fake_graph import FakeGraph
from tests.adapters.transformers.reference import model_of, padded_batch, prompt
from tests.tiers import swept

NEW = 24


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """Steps are captured in pieces on the CPU; the graphs that were recorded."""
    made: list[FakeGraph] = []

    def begin(device: Any) -> Any:
        def make() -> FakeGraph:
            made.append(FakeGraph())
            return made[-1]

        return make

    monkeypatch.setattr(decoding, "cuda_graphs", begin)
    monkeypatch.setattr(running, "capture_for", lambda session, graph: ("piecewise", "as asked"))
    return made


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "least": {"min_new_tokens": 9, "eos_token_id": list(range(3, 200))},
    "ends": {"eos_token_id": list(range(3, 40))},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "min_p": 0.01, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 16},
    "suppressed": {"suppress_tokens": list(range(3, 150)), "bad_words_ids": [[200, 201]]},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_give_the_tokens_of_transformers(name: str, graphs: list[FakeGraph]) -> None:
    model, (tokens, mask) = model_of("llama"), padded_batch()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD_ID, **SETTINGS[name]}
    torch.manual_seed(3)
    want = model.generate(tokens, attention_mask=mask, **options)
    with attach(model, loop="auto") as session:
        torch.manual_seed(3)
        got = model.generate(tokens, attention_mask=mask, **options)
        assert session.report().plain_reason is None
    assert torch.equal(got, want)
    assert sum(graph.replays for graph in graphs) > 0 or want.shape[1] - tokens.shape[1] < 4


@pytest.mark.parametrize("family", swept(["llama", "gemma2", "gpt_oss", "qwen3_moe"], 2))
@pytest.mark.parametrize("decode", swept(["dense", "streaming_llm sinks=2 window=8", "quest k=0.5 page=4", "mac"], 2))
def test_methods_and_families(family: str, decode: str, graphs: list[FakeGraph]) -> None:
    """Tokens and bytes of transformers' own loop over the attached model."""
    model, (tokens, mask) = model_of(family), padded_batch()
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    found = []
    for loop in ("plain", "captured"):
        with attach(model, decode=decode, loop=loop) as session:
            found.append(model.generate(tokens, **options))
            report = session.report()
            found.append([(r.phase, r.layer, r.rows, r.bytes_read, r.dense_bytes) for r in report.layers])
            assert report.plain_reason is None
    assert torch.equal(found[0], found[2]) and found[1] == found[3]
    assert graphs


def test_later_calls_reuse_the_step(graphs: list[FakeGraph]) -> None:
    model = model_of("llama")
    want = model.generate(prompt(), max_new_tokens=NEW, do_sample=False)
    with attach(model, loop="auto") as session:
        assert torch.equal(model.generate(prompt(), max_new_tokens=NEW, do_sample=False), want)
        recorded = len(graphs)
        kept = session.static_caches[1]
        assert torch.equal(model.generate(prompt(), max_new_tokens=NEW, do_sample=False), want)
        assert len(graphs) == recorded and session.static_caches[1] is kept


@pytest.mark.parametrize("cut", [0, 9])
@pytest.mark.parametrize("cache", [CacheConfig(), CacheConfig("paged", page=8)], ids=["contiguous", "paged"])
def test_turns_over_a_cache_of_the_caller(cut: int, cache: CacheConfig, graphs: list[FakeGraph]) -> None:
    model = model_of("llama")
    options = {"max_new_tokens": 12, "do_sample": False}
    with attach(model, loop="auto") as session:
        held = session.new_cache(1, cache)
        first = model.generate(prompt(), past_key_values=held, **options)
        assert held.get_seq_length() == 40 + 11
        held.crop(-cut)
        second = torch.cat([first[:, : 52 - cut], random_tokens(1, 13, seed=8)], 1)
        got = model.generate(second, past_key_values=held, **options)
        assert {r.rows for r in session.report().layers if r.phase == "decode"} == {22}
        assert session.report().plain_reason is None and not session.static_caches
    assert torch.equal(got, model.generate(second, **options)) and graphs


def test_prompt_from_embeddings(graphs: list[FakeGraph]) -> None:
    model = model_of("llama")
    options = {"inputs_embeds": model.get_input_embeddings()(prompt()), "max_new_tokens": 16, "do_sample": False}
    want = model.generate(**options)
    with attach(model, loop="captured"):
        assert torch.equal(model.generate(**options), want)
    assert graphs


def test_streaming(graphs: list[FakeGraph]) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    want = tokenizer.decode(model.generate(prompt(), max_new_tokens=NEW, do_sample=False)[0, 40:])
    with attach(model, loop="captured"):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        model.generate(prompt(), max_new_tokens=NEW, do_sample=False, streamer=streamer)
        assert "".join(streamer) == want
    assert graphs


class Favour(LogitsProcessor):
    """Prefers a token, and counts its calls."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        scores[:, 17] += 3.0
        return scores


class Enough(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, 40:] == 17).sum(1) >= 3


def test_processors_and_criteria_of_the_caller_see_each_step_once(graphs: list[FakeGraph]) -> None:
    model, seen = model_of("llama"), [Favour(), Favour()]
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "stopping_criteria": [Enough()]}
    want = model.generate(prompt(), logits_processor=LogitsProcessorList([seen[0]]), **options)
    with attach(model, loop="captured"):
        got = model.generate(prompt(), logits_processor=LogitsProcessorList([seen[1]]), **options)
    assert torch.equal(got, want) and seen[0].lengths == seen[1].lengths
    assert want.shape[1] < 40 + NEW, "the criterion ended the answer"


class Stop(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == 48:
            raise ZeroDivisionError
        return scores


def test_an_error_leaves_session_and_cache_as_before(graphs: list[FakeGraph]) -> None:
    model = model_of("llama")
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    want = model.generate(prompt(), **options)
    with attach(model, decode="mac", loop="auto") as session:
        held = session.new_cache()
        for cache in (held, None):
            with pytest.raises(ZeroDivisionError):
                model.generate(
                    prompt(), past_key_values=cache, logits_processor=LogitsProcessorList([Stop()]), **options
                )
        assert held.columns == 0
        assert torch.equal(model.generate(prompt(), past_key_values=held, **options), want)
        assert torch.equal(model.generate(prompt(), **options), want)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dict": ({"return_dict_in_generate": True}, "return_dict_in_generate is set"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "return_dict_in_generate is set"),
    "guidance": ({"guidance_scale": 1.5, "negative_prompt_ids": random_tokens(1, 5, seed=9)}, "guidance_scale is set"),
    "strings": ({"stop_strings": ["x"], "tokenizer": tiny_tokenizer()}, "stop_strings is set"),
    "config": (
        {"generation_config": GenerationConfig(stop_strings=["x"]), "tokenizer": tiny_tokenizer()},
        "stop_strings",
    ),
    "cache": ({"use_cache": False}, "use_cache is off"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_transformers_loop_serves(name: str, graphs: list[FakeGraph]) -> None:
    options, reason = REFUSED[name]
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    model = model_of("llama")
    want = model.generate(prompt(), **options)
    with attach(model, loop="auto") as session:
        got = model.generate(prompt(), **options)
        assert reason in (session.report().plain_reason or "") and reason in str(session.report())
        assert session.report().to_json()["plain_reason"] == session.report().plain_reason
    with attach(model, loop="captured"), pytest.raises(Unsupported, match=f"loop='captured'.*{reason}"):
        model.generate(prompt(), **options)
    assert torch.equal(*(x if isinstance(x, Tensor) else x.sequences for x in (got, want))) and not graphs


def test_hooks_and_host_memory_stay_with_transformers_loop(graphs: list[FakeGraph]) -> None:
    model = model_of("llama")
    with attach(model, loop="auto") as session:
        session.on_layer = lambda *given: None
        model.generate(prompt(), max_new_tokens=4, do_sample=False)
        assert "session.on_layer" in (session.report().plain_reason or "")
    with attach(model, cache=CacheConfig(host=True), loop="auto") as session:
        model.generate(prompt(), max_new_tokens=4, do_sample=False)
        assert "host memory" in (session.report().plain_reason or "")
    assert not graphs


def test_without_cuda_graphs_transformers_loop_runs() -> None:
    model = model_of("llama")
    with attach(model, loop="auto") as session:
        model.generate(prompt(), max_new_tokens=4, do_sample=False)
        assert "no CUDA graphs" in str(session.report()) or torch.cuda.is_available()
    with pytest.raises(UnknownName, match="loop"):
        attach(model, loop="fast")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_on_a_gpu() -> None:
    model, (tokens, mask) = tiny_model("llama").cuda(), padded_batch()
    options = {"attention_mask": mask.cuda(), "max_new_tokens": 64, "do_sample": False, "repetition_penalty": 1.1}
    with attach(model, loop="plain"):
        want = model.generate(tokens.cuda(), **options)
    with attach(model, loop="captured") as session:
        for _ in range(2):
            assert torch.equal(model.generate(tokens.cuda(), **options), want)
        (step,) = session.static_caches[len(tokens)].decoders.values()
        assert step.graph is not None
