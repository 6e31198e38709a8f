"""longreach.generate gives transformers' own tokens: every family, padding, ends, sampling, methods, and again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from longreach import MAC, CacheConfig, Kascade, OracleTopK, StreamingLLM, attach, generate
from longreach.adapters.transformers import Session
from longreach.adapters.transformers.loop import compile as compiling
from longreach.adapters.transformers.loop import run as running
from longreach.adapters.transformers.loop.compile import experts_on_device
from longreach.cache import KVCache
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.registry import names
from longreach.testing.divergence import assert_tied
from longreach.testing.tiny import PAD_ID, VOCABULARY, from_config, random_tokens, tiny_model, tiny_tokenizer
from tests.adapters.transformers.reference import (
    STEPS,
    eager_batch,
    eager_one,
    model_of,
    padded_batch,
    prompt,
)
from tests.methods.cases import CASES
from tests.methods.planned import planned, tiny, write_plans
from tests.tiers import families, swept

LAYOUTS = {"contiguous": CacheConfig(), "paged": CacheConfig("paged", page=8), "fixed": CacheConfig(capacity=200)}
layouts = pytest.mark.parametrize("cache", LAYOUTS.values(), ids=LAYOUTS)


@pytest.mark.parametrize("family", families(4))
def test_every_family_with_left_padding(family: str) -> None:
    tokens, mask = padded_batch()
    got = generate(model_of(family), tokens, mask, max_new_tokens=STEPS)
    assert torch.equal(got.tokens, eager_batch(family).answer.tokens)
    assert torch.equal(got.sequences[:, : tokens.shape[1]], tokens) and got.prompt == tokens.shape[1]


@pytest.mark.parametrize("method", swept(["mac", "dense"], 1))
def test_rows_of_answers_that_have_ended_count_no_more(method: str) -> None:
    """What a batch reads is what its answers read one by one, though the shorter one's rows go on through the model."""
    tokens, _ = padded_batch()
    tokens = tokens[:2, -40:].clamp(min=3)
    own = {"decode": MAC(tau=0.3, window=8, band=4, min_context=0, rest_rows=None) if method == "mac" else "dense"}
    with attach(model_of("llama"), **own) as session:
        free = generate(session, tokens, max_new_tokens=STEPS, eos_token_id=[]).tokens
        end = next(int(t) for t in free[0, 1:] if t not in free[1])  # ends the first answer alone
        session.reset_report()
        together = generate(session, tokens, max_new_tokens=STEPS, eos_token_id=end).tokens
        batch = [r for r in session.report().layers if r.phase == "decode"]
        session.reset_report()
        for row in range(2):
            alone = generate(session, tokens[row : row + 1], max_new_tokens=STEPS, eos_token_id=end).tokens
            assert torch.equal(alone[0], together[row, : alone.shape[1]])
        single = [r for r in session.report().layers if r.phase == "decode"]
    fed = STEPS - 1 + free[0].tolist().index(end)  # all tokens but those that end an answer
    for one, other in zip(batch, single, strict=True):
        assert one.rows == other.rows == fed
        assert (one.bytes_read, one.dense_bytes) == (other.bytes_read, other.dense_bytes)
        assert (one.notes or {}).get("reuse") == (other.notes or {}).get("reuse")


@layouts
def test_again_with_the_same_step_and_with_longer_prompts(cache: CacheConfig) -> None:
    tokens, mask = padded_batch()
    with attach(model_of("gemma2"), cache=cache) as session:
        first = generate(session, tokens, mask, max_new_tokens=STEPS)
        kept = session.static_caches[len(tokens)]
        (step,) = kept.decoders.values()
        second = generate(session, tokens, mask, max_new_tokens=STEPS)
        assert session.static_caches[len(tokens)] is kept and list(kept.decoders.values()) == [step]
        longer = generate(session, second.sequences, max_new_tokens=1)
        one = generate(session, prompt(), max_new_tokens=STEPS)
    want = eager_batch("gemma2").answer.tokens
    assert torch.equal(first.tokens, want) and torch.equal(second.tokens, want) and longer.tokens.shape[1] == 1
    assert torch.equal(one.tokens, eager_one("gemma2").answer.tokens)


SHAPED: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "least": {"min_new_tokens": 9, "eos_token_id": list(range(3, 200))},
    "sampled": {"do_sample": True, "temperature": 1.3, "min_p": 0.05, "num_return_sequences": 2},
    "strings": {"stop_strings": ["o", "w"], "tokenizer": tiny_tokenizer()},
    "criteria": {"stopping_criteria": [lambda ids, scores, **rest: (ids == ids[:, -1:]).sum(1) > 2]},
    "chunks": {"repetition_penalty": 1.3, "prefill_chunk_size": 16},
}


@pytest.mark.parametrize("name", SHAPED)
def test_arguments_that_transformers_applies(name: str) -> None:
    model, (tokens, mask) = model_of("llama"), padded_batch()
    options = {"max_new_tokens": STEPS, "pad_token_id": PAD_ID, **SHAPED[name]}
    torch.manual_seed(5)
    want = model.generate(tokens, attention_mask=mask, **{"do_sample": False, **options})
    with attach(model) as session:
        for _ in range(2):
            torch.manual_seed(5)
            got = generate(session, tokens, mask, **options)
            assert torch.equal(got.sequences, want) and got.prompt == tokens.shape[1]
        assert got.steps > 0 and got.prefill_seconds > 0 and got.decode_seconds > 0


def test_shaped_answers_continue_a_cache_and_leave_it_as_before_an_error() -> None:
    model = model_of("llama")
    options: dict[str, Any] = {"max_new_tokens": 8, "repetition_penalty": 1.3}
    with attach(model, decode="mac") as session:
        cache = session.new_cache()
        first = generate(session, prompt(), past_key_values=cache, **options).sequences
        assert cache.columns == first.shape[1] - 1
        longer = torch.cat([first, random_tokens(1, 5, seed=4)], 1)
        with pytest.raises(ZeroDivisionError):
            generate(session, longer, past_key_values=cache, logits_processor=[lambda ids, scores: 1 // 0], **options)
        assert cache.columns == first.shape[1] - 1
        second = generate(session, longer, past_key_values=cache, **options).sequences
        fresh = generate(session, longer, **options).sequences
    assert torch.equal(second, fresh)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidInput, match="stop_strings: give tokenizer= too"):
        generate(model_of("llama"), prompt(), max_new_tokens=2, stop_strings=["a"])


def scaled_by_length() -> Any:
    """Llama-4 with full attention: a layer without rotation asks the cache for its length, and scales queries by it."""
    fields = {
        "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "attn_temperature_tuning": True,
        "floor_scale": 8, "attn_scale": 0.9, "intermediate_size_mlp": 96, "num_local_experts": 2, "moe_layers": [],
        "attention_chunk_size": 16,  # of chunked layers; there are none, but the model makes their mask
    }  # fmt: skip
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": PAD_ID, "eos_token_id": None}
    return from_config(AutoConfig.for_model("llama4_text", **fields, **sizes, **heads))


GRAPHS = [None, "piecewise"] if torch.cuda.is_available() else [None]


@pytest.mark.parametrize("graph", GRAPHS)
def test_layers_that_ask_for_the_length_get_that_of_the_step(graph: Any) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = scaled_by_length().to(device)
    tokens = random_tokens(2, 20).to(device)
    options: dict[str, Any] = {"max_new_tokens": 64, "pad_token_id": PAD_ID}
    want = model.generate(tokens, do_sample=False, **options)
    with attach(model) as session:
        for _ in range(2):  # the second answer goes on with the first one's step
            made = generate(session, tokens, eos_token_id=(), graph=graph, compile="none", **options)
            assert torch.equal(made.sequences, want)


def test_masks_never_read_the_length_from_the_device() -> None:
    """A captured step cannot: only the layers of models such as Llama-4 ask for it there, and those do not read it."""
    with attach(model_of("llama")) as session:
        cache = session.new_cache(1)
        generate(session, random_tokens(1, 20), max_new_tokens=4, eos_token_id=(), past_key_values=cache)
        assert not cache.layers_asked


@layouts
def test_a_prompt_in_chunks(cache: CacheConfig) -> None:
    tokens, mask = padded_batch()
    with attach(model_of("llama"), cache=cache) as session:
        got = generate(session, tokens, mask, max_new_tokens=STEPS, prefill_chunk_size=13)
        steps = {(r.phase, r.steps) for r in session.report().layers}
    assert torch.equal(got.tokens, eager_batch("llama").answer.tokens)
    assert steps == {("prefill", -(-tokens.shape[1] // 13)), ("decode", STEPS - 1)}


def test_an_answer_ends_where_transformers_ends_it() -> None:
    tokens, mask = padded_batch()
    want = eager_batch("llama").answer.tokens
    eos = [int(want[0, 5]), int(want[1, 9])]
    model = model_of("llama")
    theirs = model.generate(
        tokens, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, eos_token_id=eos, pad_token_id=PAD_ID
    )
    got = generate(model, tokens, mask, max_new_tokens=STEPS, eos_token_id=eos, pad_token_id=PAD_ID)
    assert torch.equal(got.sequences, theirs) and bool((got.tokens == PAD_ID).any())
    alone = generate(model, prompt(), max_new_tokens=STEPS, eos_token_id=int(eager_one("llama").answer.tokens[0, 3]))
    assert alone.tokens.shape[1] <= 4


@pytest.mark.parametrize(
    "options", swept([{"top_k": 5, "top_p": 0.8}, {"temperature": 0.7, "top_k": 0}, {}], 2), ids=str
)
def test_sampling_draws_what_transformers_draws(options: dict[str, Any]) -> None:
    tokens, mask = padded_batch()
    model = model_of("qwen3")
    torch.manual_seed(3)
    want = model.generate(tokens, attention_mask=mask, max_new_tokens=STEPS, do_sample=True, **options)
    torch.manual_seed(3)
    got = generate(model, tokens, mask, max_new_tokens=STEPS, do_sample=True, **options)
    assert torch.equal(got.sequences, want)
    own = torch.Generator().manual_seed(3)
    assert torch.equal(
        generate(model, tokens, mask, max_new_tokens=STEPS, do_sample=True, generator=own, **options).sequences, want
    )


@pytest.mark.parametrize(
    "method", swept([StreamingLLM(2, 9), OracleTopK(0.3), StreamingLLM(), OracleTopK(7)], 2), ids=str
)
def test_methods_decode_as_in_transformers_loop(method: Any) -> None:
    tokens, mask = padded_batch()
    model = model_of("llama")
    with attach(model, decode=method) as session:
        want = model.generate(tokens, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
        theirs = session.report()
        session.reset_report()
        got = generate(session, tokens, mask, max_new_tokens=STEPS)
        assert torch.equal(got.sequences, want)
        ours = session.report()
    for a, b in zip(theirs.layers, ours.layers, strict=True):
        assert a.phase == "prefill" or a == b  # transformers prefills in one pass too, but pads columns it computes
    assert theirs.fraction("decode") == ours.fraction("decode")


def test_a_cache_is_gone_on_with() -> None:
    tokens, mask = padded_batch()
    want = eager_batch("llama").answer.tokens
    with attach(model_of("llama")) as session:
        cache = session.new_cache(len(tokens))
        first = generate(session, tokens, mask, max_new_tokens=7, past_key_values=cache)
        assert cache.columns == tokens.shape[1] + 6
        rest = generate(session, first.sequences, max_new_tokens=STEPS - 7, past_key_values=cache)
    assert torch.equal(torch.cat([first.tokens, rest.tokens], 1), want)


def test_a_streamer_sees_every_token() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen.append(value.clone())

        def end(self) -> None:
            self.seen.append(None)

    tokens, mask = padded_batch()
    ours, theirs = Streamer(), Streamer()
    got = generate(model_of("llama"), tokens, mask, max_new_tokens=9, streamer=ours)
    model_of("llama").generate(tokens, attention_mask=mask, max_new_tokens=9, do_sample=False, streamer=theirs)
    assert len(ours.seen) == len(theirs.seen) == 11 and ours.seen[-1] is None
    assert all(torch.equal(a, b) for a, b in zip(ours.seen[:-1], theirs.seen[:-1], strict=True))
    assert torch.equal(torch.stack(ours.seen[1:-1], 1), got.tokens)


@pytest.mark.parametrize("decode", swept([None, OracleTopK()], 1))
def test_a_step_that_cannot_be_captured_says_why_and_leaves_no_trace(decode: Any, monkeypatch: Any) -> None:
    """What fails while a stream captures must surface, not what undoing it would trip over."""
    model = tiny_model("llama")
    ids = torch.arange(3, 23)[None]
    capturing = False

    @contextmanager
    def graph(*args: Any, **kwargs: Any) -> Iterator[None]:
        nonlocal capturing
        capturing = True
        try:
            yield
        finally:
            capturing = False

    def ints(self: KVCache, values: Any) -> torch.Tensor:
        if capturing:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
        return plain(self, values)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if capturing:
            raise RuntimeError("this layer looks at the host")
        return layer_forward(*args, **kwargs)

    plain, layer_forward = KVCache._ints, model.model.layers[1].forward
    monkeypatch.setattr(KVCache, "_ints", ints)
    monkeypatch.setattr(model.model.layers[1], "forward", forward)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(sys.modules[Session.__module__], "stream_captures", lambda: capturing)
    monkeypatch.setattr(running, "capture_for", lambda *a: ("full", None))
    with attach(model, decode=decode) as session:
        want = generate(session, ids, max_new_tokens=2).tokens
        with pytest.raises(Unsupported, match="cannot be captured in a CUDA graph: this layer looks at the host"):
            generate(session, ids, max_new_tokens=9, compile="none")
        assert torch.equal(generate(session, ids, max_new_tokens=2).tokens, want)


@pytest.mark.parametrize("where", ["between steps", "in a layer"])
def test_ctrl_c_leaves_session_and_cache_as_they_were(where: str, monkeypatch: Any) -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 23)[None]

    class Stop:
        count = 0

        def put(self, value: Any) -> None:
            self.count += 1
            if self.count == 4:
                raise KeyboardInterrupt

        def end(self) -> None:
            raise AssertionError("the answer was broken off")

    plain, passes = model.model.layers[1].forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    with attach(model) as session:
        cache = session.new_cache(1)
        begun = generate(session, ids, max_new_tokens=3, past_key_values=cache)
        want = generate(session, begun.sequences, max_new_tokens=9)
        session.reset_report()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            if where == "in a layer":
                patch.setattr(model.model.layers[1], "forward", forward)
            generate(
                session, begun.sequences, max_new_tokens=9, past_key_values=cache,
                streamer=Stop() if where == "between steps" else None,
            )  # fmt: skip
        assert cache.columns == ids.shape[1] + 2 == cache.kv.lengths[0]
        again = generate(session, begun.sequences, max_new_tokens=9, past_key_values=cache)
    assert torch.equal(again.sequences, want.sequences)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama"])
def test_experts_are_computed_without_the_host_while_a_step_is_captured(family: str) -> None:
    model = tiny_model(family)
    before, ids = model.get_experts_implementation(), torch.arange(3, 23)[None]
    want = model(ids).logits
    with pytest.raises(ZeroDivisionError), experts_on_device(model):
        inside = set(model.get_experts_implementation().values())
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-5)
        raise ZeroDivisionError
    assert inside == {"eager" if family == "llama" else "batched_mm"}  # a model without experts has nothing to change
    assert model.get_experts_implementation() == before and torch.equal(model(ids).logits, want)


def test_fused_parts_are_what_they_were_afterwards(monkeypatch: Any) -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 23)[None]
    module = sys.modules[type(model).__module__]
    compiled: list[Any] = []
    monkeypatch.setattr(compiling, "_compiled", lambda f: compiled.append(f) or f)
    rotation, hooked = getattr(module, compiling.ROTARY), model.model.layers[0].mlp
    hooked.register_forward_hook(lambda *a: None)
    with pytest.raises(ZeroDivisionError), compiling.compiled_parts(model, "compile"):
        changed = [name for name, m in model.named_modules() if "forward" in m.__dict__]
        assert torch.equal(model(ids).logits, model(ids).logits)
        raise ZeroDivisionError
    layers = model.config.num_hidden_layers
    assert (
        len(changed) == 2 * layers + 1 + layers - 1 and "model.layers.0.mlp" not in changed
    )  # norms, and MLPs but one
    assert rotation in compiled and getattr(module, compiling.ROTARY) is rotation
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.fixture(scope="module")
def plans_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plans(tmp_path_factory.mktemp("plans"))


@pytest.mark.sweep  # on a CPU, test_loop_pieces.py runs the methods
@pytest.mark.gpu
@pytest.mark.parametrize("name", names("decode"))
def test_methods_are_captured_or_say_why_not(name: str, plans_of_tests: Path) -> None:
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = tiny().to(place), torch.arange(3, 43, device=place)[None]
    with planned(plans_of_tests), attach(model, decode=CASES[name].default) as session:
        plain = generate(session, ids, max_new_tokens=12, graph=False)
        got = generate(session, ids, max_new_tokens=12)
        assert got.captured == (session.decode.capture if place == "cuda" else None)
        assert (got.not_captured_reason is None) == (got.captured == "full")
    assert torch.equal(got.sequences, plain.sequences)


@pytest.mark.sweep  # on a CPU nothing is captured
@pytest.mark.gpu
@pytest.mark.covering
@pytest.mark.parametrize("scoring", ["exact", "int8"])
@pytest.mark.parametrize("heads", ["kv", "all"])
@pytest.mark.parametrize("dense_below", [0, 46])
def test_budgets_grow_with_the_context_in_one_captured_step(
    scoring: Any, heads: Any, dense_below: int, plans_of_tests: Path
) -> None:
    """From 40 keys to 64: 12 to 20 of them are chosen, and where it says so from 46 on."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = tiny().to(place), torch.arange(3, 43, device=place)[None]
    method = Kascade(k=0.3, min_keys=2, scoring=scoring, heads=heads, dense_below=dense_below)
    made, reads = [], []
    for graph in (False, None):
        with planned(plans_of_tests), attach(model, decode=method) as session:
            made.append(generate(session, ids, max_new_tokens=24, graph=graph))
            reads.append(session.report().fraction("decode"))
    assert [x.captured for x in made] == [None, "full" if place == "cuda" else None]
    assert torch.equal(made[0].sequences, made[1].sequences) and reads[0] == reads[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache", [LAYOUTS["contiguous"], LAYOUTS["paged"]], ids=["contiguous", "paged"])
def test_low_precision_parts_from_transformers_only_at_ties(cache: CacheConfig, dtype: torch.dtype) -> None:
    """On a CPU uncaptured; on a GPU (make test-gpu) this is the captured step on Triton kernels."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_model("llama").to(place, dtype)
    ids = torch.randint(3, 90, (3, 33), generator=torch.Generator().manual_seed(5)).to(place)
    theirs = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=PAD_ID)
    with attach(model, cache=cache) as session:
        got = generate(session, ids, max_new_tokens=24, pad_token_id=PAD_ID)
        assert got.captured == ("full" if place == "cuda" else None)
    if dtype == torch.float32:
        assert torch.equal(got.sequences, theirs)
    assert_tied(model, got.sequences, theirs)
