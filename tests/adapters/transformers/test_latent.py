"""Models with multi-head latent attention (MLA) give transformers' own answers from a cache of latent vectors."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

import longreach
from longreach import MAC, CacheConfig, Kascade, Quest, StreamingLLM, attach
from longreach.adapters.transformers import inspect_model
from longreach.adapters.transformers.latent import EXPAND, LatentQuery, check_expansion, check_kernels, weights
from longreach.adapters.transformers.rotary import Rotation
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.call import ModelShape
from longreach.methods.registry import METHODS
from longreach.testing.tiny import LATENTS, SHAPE, from_config, random_tokens, save_tiny, tiny_model
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

FIRST = ("deepseek_v3", "deepseek_v2", "minicpm3")
FAMILIES = swept([*FIRST, *(name for name in LATENTS if name not in FIRST)], len(FIRST))
WIDTH = 48  # channels in the cache: 32 of the latent, 16 rotated
EVERYTHING: tuple[Any, ...] = (StreamingLLM(window=4096), Quest(k=1.0), Quest(k=1.0, dense_layers=()), "mac", "kascade")


@pytest.mark.parametrize("family", FAMILIES)
def test_one_sequence(family: str) -> None:
    assert_same_steps(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_exact_as_eager_ones(family: str) -> None:
    with attach(model_of(family)):
        got = generate(model_of(family), prompt())
    want = eager_one(family)
    assert torch.equal(got.tokens, want.answer.tokens)
    if family in ("minicpm3", "youtu"):  # rounding may turn the choice of an expert
        assert_same_answer(got, want)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", [CacheConfig(), CacheConfig("paged", page=8)], ids=["contiguous", "paged"])
def test_left_padded_batch_in_chunks(family: str, cache: CacheConfig) -> None:
    tokens, mask = padded_batch()
    with attach(model_of(family), cache=cache):
        whole = generate(model_of(family), tokens, mask)
        chunks = generate(model_of(family), tokens, mask, prefill_chunk_size=13)
        one = generate(model_of(family), prompt(), prefill_chunk_size=7)
    assert torch.equal(whole.tokens, eager_batch(family).answer.tokens)
    assert torch.equal(chunks.tokens, whole.tokens)
    assert torch.equal(one.tokens, eager_one(family).answer.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_longreach_generate(family: str) -> None:
    model, (tokens, mask) = model_of(family), padded_batch()
    with attach(model) as session:
        got = longreach.generate(session, tokens, mask, max_new_tokens=64)
    want = model.generate(tokens, attention_mask=mask, max_new_tokens=64, do_sample=False)
    assert torch.equal(got.sequences, want)


@pytest.mark.parametrize("decode", EVERYTHING, ids=str)
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_methods_that_read_all_keys(family: str, decode: Any) -> None:
    """64 tokens after a padded batch. Kascade's plan and MAC's search need longer prompts, so both attend densely."""
    tokens, mask = padded_batch()
    with attach(model_of(family), decode=decode) as session:
        got = generate(model_of(family), tokens, mask, steps=64)
        mine = longreach.generate(session, tokens, mask, max_new_tokens=64)
    want = generate(model_of(family), tokens, mask, steps=64)
    assert torch.equal(got.tokens, want.tokens) and torch.equal(mine.tokens, want.tokens)


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_choose_keys(method: str) -> None:
    """Every method decodes after a longer prompt and reads less than everything, or dense attention's bytes."""
    options = {"mac": "mac min_context=64 window=64 band=32", "kascade": "kascade k=0.1 min_keys=16"}
    model = model_of("deepseek_v3")
    if method == "magicpig":
        with pytest.raises(InvalidInput, match="magicpig: expected keys and values apart, got one latent vector"):
            attach(model, decode=method)
        return
    decode = Quest(dense_layers=()) if method == "quest" else options.get(method, method)
    with attach(model, decode=decode) as session:
        got = generate(model, random_tokens(1, 2200), steps=8)
        rows = [r for r in session.report().layers if r.phase == "decode"]
    assert got.tokens.shape == (1, 8) and bool(got.logits.isfinite().all())
    assert {r.layer for r in rows} == {0, 1}
    assert all(r.key_bytes > 0 for r in rows)
    if method in ("streaming_llm", "quest"):
        assert all(r.bytes_read < 0.5 * r.dense_bytes for r in rows)


def test_kascade_reads_prompts(tmp_path: Any) -> None:
    """Its plan of the first prompt, then a prompt and an answer through it with all keys, as dense attention."""
    model, tokens = model_of("deepseek_v3"), random_tokens(1, 2200)
    with attach(model, decode="kascade") as session:
        generate(model, tokens, steps=2)
        (plan,) = session.report().plans
        assert plan.source == "prompt" and plan.file is not None
    whole = Kascade(plan=plan.file, k=1.0)
    want = generate(model, prompt(), steps=16)
    with attach(model, prefill=whole, decode=whole):
        assert torch.equal(generate(model, prompt(), steps=16).tokens, want.tokens)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "youtu"])
def test_queries_before_rotation(family: str) -> None:
    """The rotated channels of a cached vector come first, so that they are unrotated as those of other models."""
    model, tokens = model_of(family), random_tokens(1, 6)[:, :1].expand(1, 6)
    rows: list[torch.Tensor] = []
    with attach(model, decode=MAC(min_context=2)) as session:

        def see(phase: Any, call: Any, outcome: Any) -> None:
            if call.layer == 0 and phase == "prefill":
                rows.extend(call.pre_rope())

        session.on_layer = see
        with torch.no_grad():
            model(tokens, use_cache=True)
        assert all(isinstance(x, Rotation) for x in session.facts.rotations.values())
    for x in rows:  # of equal tokens: equal before rotation
        assert x.shape[0] == 6 and x.shape[2] == WIDTH
        torch.testing.assert_close(x, x[:1].expand_as(x), rtol=1e-4, atol=1e-4)


def test_the_cache_holds_one_vector_a_token() -> None:
    model = model_of("deepseek_v3")
    with attach(model, cache=CacheConfig(capacity=100)) as session:
        cache = session.new_cache(2)
        generate(model, random_tokens(2, 30), steps=4, past_key_values=cache)
        assert cache.kv.nbytes == 2 * 2 * 100 * WIDTH * 4
        view = cache.kv.view_of_all(0)
        assert view.v is view.k and view.values_in_keys and view.k.shape[1] == 1
        dense = [r for r in session.report().layers if r.phase == "decode"]
    slots = 2 * sum(range(31, 34))
    assert all((r.key_bytes, r.value_bytes) == (slots * WIDTH * 4, 0) for r in dense)
    assert all(r.bytes_read == r.dense_bytes for r in dense)


def test_caches_are_copied_cut_evicted_and_saved(tmp_path: Any) -> None:
    model, more = model_of("deepseek_v3"), random_tokens(1, 3, seed=5)

    def read(cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, past_key_values=cache, use_cache=True).logits

    with attach(model, decode="quest", cache=CacheConfig("paged", page=8)) as session:
        cache = session.new_cache()
        read(cache, prompt())
        cache.save(tmp_path / "cache.safetensors")
        loaded, copied = session.load_cache(tmp_path / "cache.safetensors"), cache.copy()
        want = read(cache, more)
        for other in (loaded, copied):
            assert other.kv.view_of_all(1).v is other.kv.view_of_all(1).k
            assert torch.equal(read(other, more), want)
        cache.crop(-3)
        assert torch.equal(read(cache, more), want)
    with attach(model, evict="snapkv capacity=16 window=4") as session:
        cache = session.new_cache()
        generate(model, prompt(), steps=8, past_key_values=cache)
        assert cache.kv.slots_in_use(0) == [16 + 7] and cache.kv.view_of_all(0).values_in_keys
    whole = eager_one("deepseek_v3").answer.tokens  # copies the model, which must not be attached then
    with attach(model, evict="snapkv capacity=40 window=4"):
        assert torch.equal(generate(model, prompt()).tokens, whole)


def test_the_model_is_unchanged_afterwards() -> None:
    model = model_of("deepseek_v3")
    before = [dict(vars(m)) for m in model.modules()]
    logits = model(prompt()).logits
    with attach(model, decode="mac"):
        assert EXPAND in vars(model.model.layers[0].self_attn)
        model.generate(prompt(), max_new_tokens=2)
    assert [vars(m).keys() for m in model.modules()] == [x.keys() for x in before]
    assert torch.equal(model(prompt()).logits, logits)


def test_gradients_flow_without_a_cache() -> None:
    model = tiny_model("minicpm3")
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    model(prompt(), use_cache=False).logits.square().mean().backward()
    want, weight.grad = weight.grad.clone(), None
    with attach(model, impl="reference"):
        model(prompt(), use_cache=False).logits.square().mean().backward()
    torch.testing.assert_close(weight.grad, want, rtol=1e-3, atol=1e-5)


class _Added(nn.Module):
    """A projection with a part of low rank, as LoRA has it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.low = base, nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.up = nn.Parameter(0.1 * torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.low.T @ self.up.T


def test_projections_that_are_not_plain() -> None:
    model = tiny_model("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = _Added(layer.self_attn.kv_b_proj)
    want = generate(model, prompt())
    with attach(model):
        assert torch.equal(generate(model, prompt()).tokens, want.tokens)


def test_check_shows_the_latent_cache(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from longreach.cli.main import main

    path = save_tiny(tmp_path, "deepseek_v3")
    found = inspect_model(path)
    assert found.refused is None and found.shape is not None
    assert (found.shape.kv_heads, found.shape.head_dim, found.shape.values_in_keys) == (1, WIDTH, True)
    assert found.kv_bytes(100, batch=2, element=4) == 2 * 2 * 100 * WIDTH * 4
    assert main(["check", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one latent vector of 48 channels a token" in text and "On a GPU" not in text
    (path / "config.json").write_text(
        json.dumps(json.loads((path / "config.json").read_text()) | {"kv_lora_rank": 576})
    )
    assert main(["check", str(path)]) == 0
    assert "On a GPU: DeepseekV3ForCausalLM attends with up to 4 query heads" in " ".join(
        capsys.readouterr().out.split()
    )


# what is refused


def test_what_latent_caches_do_not_do() -> None:
    model = model_of("deepseek_v3")
    for given, why in (
        ({"fuse": "full_reuse"}, "cached vectors longreach does not store in chunks"),
        ({"cache": CacheConfig(host=True)}, "host memory does not hold a latent cache"),
    ):
        with pytest.raises(Unsupported, match=why):
            attach(model, **given)


SPARSE = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16, "qk_head_dim": 40}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v32": (SPARSE, "DeepseekV32ForCausalLM.*(indexer|layers of type)"),
    "longcat_flash": ({"head_dim": 16, "num_layers": 2, "expert_ffn_hidden_size": 32}, "LongcatFlash.* in layers"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_of_latent_attention_are_refused(kind: str) -> None:
    fields, why = REFUSED[kind]
    shape = {**SHAPE, **LATENTS["deepseek_v3"][1], **fields}
    with pytest.raises(Unsupported, match=why):
        attach(from_config(AutoConfig.for_model(kind, **shape)))


def test_expansions_of_another_formula_are_refused() -> None:
    module = tiny_model("deepseek_v3").model.layers[0].self_attn
    check_expansion(module)

    class Other(type(module)):  # type: ignore[misc]
        def expand_kv(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = super().expand_kv(latent, rotated)
            return k, 2 * v

    module.__class__ = Other
    with pytest.raises(Unsupported, match="by a formula of its own"):
        check_expansion(module)


def test_macs_search_pays_later_where_key_and_value_are_one() -> None:
    """A ring row of each query head costs as much as a key, of which a token has one for all heads."""
    state = {}
    for family in ("llama", "deepseek_v3"):
        model = model_of(family)
        with attach(model, decode=MAC(window=64, band=32)) as session:
            cache = session.new_cache()
            model(prompt(), past_key_values=cache, use_cache=True)
            (state[family],) = cache.states.states((session.decode,), 0)
    prices = {family: found.rule.price for family, found in state.items()}
    assert prices == {"llama": 2 * (64 + 6) / 128, "deepseek_v3": 4 * (4 * WIDTH + 6) / (4 * WIDTH)}
    assert state["deepseek_v3"].rule.min_context == math.ceil(prices["deepseek_v3"] * 64) + 32


def test_heads_of_the_full_size() -> None:
    """32 query heads over vectors of 576 channels, as DeepSeek-V3's."""
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = tiny_model("minicpm3", **sizes)
    want = generate(model, prompt(), steps=8)
    for decode in (None, Quest(k=1.0, dense_layers=()), StreamingLLM(window=4096)):
        with attach(model, decode=decode):
            assert torch.equal(generate(model, prompt(), steps=8).tokens, want.tokens)


def test_queries_in_the_space_of_latents() -> None:
    module, generator = tiny_model("deepseek_v3").model.layers[0].self_attn, torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, 5, 24 + 16, generator=generator)
    c, r = (torch.randn(2, 1, 7, n, generator=generator) for n in (32, 16))
    k, v = module.expand_kv(c, r)
    moved = LatentQuery.of(module, q)
    vectors = torch.cat([r, c], -1)
    torch.testing.assert_close(moved.query @ vectors.transpose(2, 3), q @ k.transpose(2, 3), rtol=1e-4, atol=1e-4)
    p = torch.softmax(torch.randn(2, 4, 5, 7, generator=generator), -1)
    out = moved.expand((p @ vectors).transpose(1, 2))
    torch.testing.assert_close(out, (p @ v).transpose(1, 2), rtol=1e-4, atol=1e-4)
    assert [x.shape for x in weights(module)] == [(4, 24, 32), (4, 16, 32)]


def test_gpus_lack_kernels_for_wider_heads() -> None:
    shape, gpu = ModelShape(2, 128, 1, 576, values_in_keys=True), torch.device("cuda")
    check_kernels("DeepseekV3ForCausalLM", shape, gpu, "auto")
    shape = ModelShape(2, 128, 1, 640, values_in_keys=True)
    with pytest.raises(Unsupported, match=r"128 query heads a KV head and 640 channels.*128 and 576.*impl='reference'"):
        check_kernels("DeepseekV3ForCausalLM", shape, gpu, "auto")
    check_kernels("DeepseekV3ForCausalLM", shape, gpu, "reference")
    check_kernels("DeepseekV3ForCausalLM", shape, torch.device("cpu"), "auto")
    check_kernels("LlamaForCausalLM", ModelShape(2, 32, 8, 128), gpu, "auto")


def test_memory_for_one_is_not_memory_for_two() -> None:
    from longreach.cache import KVCache

    kv, k = KVCache(1, 1), torch.zeros(3, 1, 16)
    step = kv.begin([0], [3])
    kv.append(0, step, k, k)
    kv.commit(step)
    step = kv.begin([0], [3])
    with pytest.raises(InvalidInput, match="layer 0 holds its values as the keys themselves"):
        kv.append(0, step, k, k.clone())


def test_magicpig_takes_sixteen_query_heads_a_kv_head() -> None:
    model = tiny_model("llama", num_attention_heads=32, num_key_value_heads=1, head_dim=8)
    with pytest.raises(InvalidInput, match="magicpig: expected at most 16 query heads a KV head, got 32"):
        attach(model, decode="magicpig")
    want = generate(model, prompt(), steps=8)
    for decode in (None, "quest k=1.0 dense_layers=[0]"):
        with attach(model, decode=decode):
            assert torch.equal(generate(model, prompt(), steps=8).tokens, want.tokens)
