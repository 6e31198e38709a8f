"""Stored keys, rotated by the model's own code, and values are what a dense prefill leaves in transformers' cache."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PreTrainedModel
from transformers.models.llama import modeling_llama

from longreach import StreamingLLM, attach
from longreach.adapters.transformers.fingerprint import fingerprint
from longreach.adapters.transformers.precompute import Precompute
from longreach.errors import InvalidInput, OutOfMemory, Unsupported
from longreach.store.key import Chunk
from longreach.testing.tiny import FAMILIES, from_config, random_tokens, tiny_model
from tests.adapters.transformers.reference import model_of
from tests.tiers import families

PREFIX, CHUNK, SHIFT = 13, 47, 1000  # the window of sliding layers is 16

SLIDING: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 4},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "cohere2": SLIDING,  # no rotation in full layers
    "smollm3": {"no_rope_layers": [1, 0]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@cache
def model_named(name: str) -> PreTrainedModel:
    if name in FAMILIES:
        return model_of(name)
    fields = {
        "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
        "max_position_embeddings": 4096, "eos_token_id": None, "pad_token_id": 256, "bos_token_id": 257,
    }  # fmt: skip
    return from_config(AutoConfig.for_model(name, **{**fields, **OTHERS[name]}))


def tokens_of(length: int, seed: int = 5) -> list[int]:
    return [int(t) for t in random_tokens(1, length, seed=seed)[0]]


def precomputed(model: Any, tokens: list[int], prefix: list[int], *, chunk: int = 512) -> Chunk:
    with attach(model) as session:
        return Precompute(session, prefix, chunk=chunk).compute(tokens)


@torch.no_grad()
def dense(model: Any, tokens: list[int], first: int) -> tuple[list[tuple[Tensor, Tensor]], list[Any]]:
    """Keys and values [G, N, D] of every layer in transformers' cache, positions from `first`; what each rotates by."""
    kept, pairs = DynamicCache(), dict[int, Any]()

    def note(module: Any, args: Any, kwargs: Any) -> None:
        pairs[module.layer_idx] = (module, *kwargs["position_embeddings"])

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
    positions = torch.arange(first, first + len(tokens))[None]
    model(torch.tensor([tokens]), position_ids=positions, past_key_values=kept, use_cache=True)
    for hook in hooks:
        hook.remove()
    return [(layer.keys[0], layer.values[0]) for layer in kept.layers], [pairs[n] for n in sorted(pairs)]


def rotated(key: Tensor, module: Any, cos: Tensor, sin: Tensor) -> Tensor:
    """A stored key [G, N, D] turned as the model's own code turns keys, where the layer turns any."""
    name = type(module).__name__
    still = (name == "SmolLM3Attention" and not module.use_rope) or (
        name == "Cohere2Attention" and module.sliding_window is None
    )
    turn = sys.modules[type(module).__module__].apply_rotary_pos_emb
    return key if still else turn(key[None], key[None], cos, sin)[1][0]


def assert_as_good(model: Any, got: Chunk, tokens: list[int], first: int, from_column: int) -> None:
    """As near to fp64 with the same weights as transformers in the same dtype: twice its error, and one rounding.

    An fp64 copy takes angles, norms and softmax in fp32 all the same, so in fp32 what it says is off by as much again
    as fp32 is, and the bound is twice that.
    """
    theirs, pairs = dense(model, tokens, first)
    exact_model = copy.deepcopy(model).double()
    exact_model.set_experts_implementation("eager")
    truth, _ = dense(exact_model, tokens, first)
    eps = torch.finfo(theirs[0][0].dtype).eps
    factor = 4 if theirs[0][0].dtype == torch.float32 else 2
    for layer, ((key, value), (exact_key, exact_value)) in enumerate(zip(theirs, truth, strict=True)):
        module, cos, sin = pairs[layer]
        part = slice(from_column, None)
        own = rotated(got.keys[layer], module, cos[:, part], sin[:, part])
        for mine, their, exact in (
            (own, key[:, part], exact_key[:, part]),
            (got.values[layer], value[:, part], exact_value[:, part]),
        ):
            assert mine.dtype == their.dtype and mine.shape == their.shape
            error, allowed = (mine - exact).norm(), factor * (their - exact).norm() + eps * exact.norm()
            assert error <= allowed, (layer, float(error), float(allowed))


@pytest.mark.parametrize("name", [*families(4), *OTHERS])
def test_behind_a_prefix(name: str) -> None:
    """Read in passes that divide neither prefix nor chunk."""
    tokens = tokens_of(PREFIX + CHUNK)
    got = precomputed(model_named(name), tokens[PREFIX:], tokens[:PREFIX], chunk=9)
    assert got.tokens.tolist() == tokens[PREFIX:] and got.prefix.tolist() == tokens[:PREFIX]
    assert_as_good(model_named(name), got, tokens, 0, PREFIX)


@pytest.mark.parametrize("name", [*families(4), *OTHERS])
def test_alone_and_rotated_elsewhere(name: str) -> None:
    """Computed at position 0, it is what the model has of these tokens alone at any other position.

    Frequencies are cut to 8 bits, so that an angle at a position of 10 bits is exact in fp32: otherwise models of fp32
    angles do not rotate by them quite, and what is compared is that.
    """
    model, tokens = copy.deepcopy(model_named(name)), tokens_of(CHUNK)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("inv_freq"):
            buffer.copy_(buffer.bfloat16())
    assert_as_good(model, precomputed(model, tokens, []), tokens, SHIFT, 0)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "glm4", "gemma3_text"])
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    model, tokens = copy.deepcopy(model_named(name)).to(dtype), tokens_of(PREFIX + CHUNK)
    got = precomputed(model, tokens[PREFIX:], tokens[:PREFIX], chunk=20)
    assert got.key.dtype == str(dtype).removeprefix("torch.")
    assert_as_good(model, got, tokens, 0, PREFIX)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_keys_are_to_the_bit_what_the_layer_made_before_rotation(name: str, dtype: torch.dtype) -> None:
    model, tokens = copy.deepcopy(model_named(name)).to(dtype), tokens_of(CHUNK)
    made = dict[int, Tensor]()

    def note(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            flat = out if out.dim() == 4 else out[..., -64 if name == "phi3" else 0 :][..., :32].unflatten(-1, (2, 16))
            made[layer] = flat if flat.shape[1] == 2 else flat.transpose(1, 2)

        return hook

    for n, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        source = getattr(attention, "k_norm", None) or getattr(attention, "k_proj", None) or attention.qkv_proj
        source.register_forward_hook(note(n))
    got = precomputed(model, tokens, [])
    for layer, key in enumerate(got.keys):
        assert torch.equal(key, made[layer][0]), layer


def test_the_tests_can_see_a_wrong_position_and_a_wrong_context() -> None:
    model, tokens = model_named("llama"), tokens_of(PREFIX + CHUNK)
    behind = precomputed(model, tokens[PREFIX:], tokens[:PREFIX])
    alone = precomputed(model, tokens[PREFIX:], [])
    for got, first, what in ((behind, 1, "context"), (alone, 0, "context")):
        swapped = tokens[1:PREFIX] + tokens[:1] if got is behind else tokens[:PREFIX]
        with pytest.raises(AssertionError, match=r"\(1, "):
            assert_as_good(model, got, [*swapped, *tokens[PREFIX:]], first, PREFIX), what
    _, pairs = dense(model, tokens, 0)
    module, cos, sin = pairs[0]
    right, wrong = (
        rotated(behind.keys[0], module, x[:, PREFIX:], y[:, PREFIX:])
        for x, y in ((cos, sin), (cos.roll(1, 1), sin.roll(1, 1)))
    )
    assert (right - wrong).norm() > 0.1 * right.norm()


def test_a_prefix_changes_the_chunk() -> None:
    """Guard: behind a prefix and alone are different chunks, with different names."""
    model, tokens = model_named("llama"), tokens_of(PREFIX + CHUNK)
    alone = precomputed(model, tokens[PREFIX:], [])
    behind = precomputed(model, tokens[PREFIX:], tokens[:PREFIX])
    assert alone.key != behind.key and alone.key.name != behind.key.name
    assert torch.equal(alone.values[0], behind.values[0])  # the first layer sees no context
    assert (alone.values[1] - behind.values[1]).norm() > 0.1 * behind.values[1].norm()


def test_the_prefix_is_read_once_and_chunks_leave_no_trace() -> None:
    model, tokens = tiny_model("gemma2"), tokens_of(100)
    passes, told = list[int](), list[int]()
    with attach(model) as session:
        forward = model.model.forward
        model.model.forward = lambda **kwargs: passes.append(kwargs["input_ids"].shape[1]) or forward(**kwargs)
        work = Precompute(session, tokens[:20], chunk=16)
        first = work.compute(tokens[20:60], told.append)
        assert passes == [16, 4, 16, 16, 8] and told == [16, 16, 8]
        work.compute(tokens[60:])
        again = work.compute(tokens[20:60])
        assert passes[5:] == [16, 16, 8] * 2
        del model.model.__dict__["forward"]
        model.model.__dict__["forward"] = forward
    for a, b in zip((*first.keys, *first.values), (*again.keys, *again.values), strict=True):
        assert torch.equal(a, b)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_what_cannot_be_a_chunk_is_refused() -> None:
    with attach(model_named("llama")) as session:
        work = Precompute(session, [1, 2])
        with pytest.raises(InvalidInput, match="holds no tokens"):
            work.compute([])
        with pytest.raises(InvalidInput, match="token 264 is not in the model's vocabulary of 264"):
            work.compute([3, 264])
        with pytest.raises(InvalidInput, match=r"4095 tokens behind a prefix of 2 .* context of 4096"):
            work.check([3] * 4095)
        with pytest.raises(InvalidInput, match="prefix: token -1"):
            Precompute(session, [-1])
        with pytest.raises(InvalidInput, match="expected a count of tokens >= 1, got 0"):
            Precompute(session, chunk=0)
    with (
        attach(model_named("llama"), prefill=StreamingLLM()) as session,
        pytest.raises(InvalidInput, match="prefills with streaming_llm"),
    ):
        Precompute(session)


def test_no_chunk_lies_where_frequencies_change() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64, max_position_embeddings=256)
    tokens = tokens_of(PREFIX + CHUNK)
    got = precomputed(model, tokens[PREFIX:], tokens[:PREFIX], chunk=9)
    assert_as_good(model, got, tokens, 0, PREFIX)
    with attach(model) as session, pytest.raises(InvalidInput, match=r"beyond token 64, where .* rotation changes"):
        Precompute(session, tokens[:PREFIX]).compute(tokens_of(64 - PREFIX + 1))


def test_a_position_that_enters_keys_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = modeling_llama.apply_rotary_pos_emb

    def fading(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        q, k = turn(q, k, cos, sin)
        return q, k * (1 + 0.01 * sin[:, None, :, :1].abs())

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", fading)
    with attach(model_named("llama")) as session, pytest.raises(Unsupported, match="otherwise than by rotation"):
        Precompute(session).compute(tokens_of(9))


def test_a_model_without_rotation_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=264, n_embd=64, n_layer=2, n_head=4)
    with attach(from_config(config)) as session, pytest.raises(Unsupported, match="no rotary embedding"):
        Precompute(session)


def test_numbers_that_are_not_finite_are_not_handed_out() -> None:
    model = tiny_model("llama").half()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(60000)
    with attach(model) as session, pytest.raises(Unsupported, match=r"layer 1 .* no finite numbers.*--dtype bfloat16"):
        Precompute(session).compute(tokens_of(9))


def test_weights_that_change_are_noticed() -> None:
    model = tiny_model("llama")
    with attach(model) as session:
        work = Precompute(session)
        work.compute(tokens_of(9))
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        with pytest.raises(Unsupported, match="have changed since"):
            work.compute(tokens_of(9))


def test_the_fingerprint_of_another_model_is_refused() -> None:
    """Also of an equal one: nothing says that it is equal but reading it."""
    with attach(model_named("llama")) as session:
        for other in (tiny_model("qwen3"), tiny_model("llama")):
            with pytest.raises(Unsupported, match="not those its fingerprint was taken of"):
                Precompute(session, known=fingerprint(other))
        Precompute(session, known=fingerprint(session.model))


def test_memory_that_runs_out_is_told_and_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny_model("llama"), tokens_of(60)
    forward = modeling_llama.LlamaMLP.forward
    with attach(model) as session:
        work = Precompute(session, tokens[:10], chunk=16)
        want = work.compute(tokens[10:])
        calls = list[int]()

        def short(self: Any, x: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return forward(self, x)

        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama.LlamaMLP, "forward", short)
            with pytest.raises(OutOfMemory, match=r"chunk of 50 tokens .* 16 at a time.*--chunk-tokens"):
                work.compute(tokens[10:])
        got = work.compute(tokens[10:])
    assert all(torch.equal(a, b) for a, b in zip((*got.keys, *got.values), (*want.keys, *want.values), strict=True))
