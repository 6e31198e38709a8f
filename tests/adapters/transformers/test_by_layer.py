"""Models whose heads differ by layer (Gemma-4): answers, memory, state and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

import longreach
from longreach import MAC, CacheConfig, Quest, StreamingLLM, attach
from longreach.adapters.transformers import inspect_model
from longreach.adapters.transformers.checks import shape_of
from longreach.adapters.transformers.latent import check_kernels
from longreach.errors import Unsupported
from longreach.methods.model_config import config_hash, shape_of_config
from longreach.methods.registry import METHODS
from longreach.testing.tiny import BY_LAYER, SHAPE, random_tokens, save_tiny, tiny_model
from tests.adapters.transformers.reference import (
    assert_same_answer,
    eager_batch,
    eager_one,
    generate,
    model_of,
    padded_batch,
    prompt,
)

FAMILIES = list(BY_LAYER)
HEADS = {"gemma4": ((2, 16), (1, 32)) * 2, "gemma4_inputs": ((2, 16), (2, 32)) * 2}  # (KV heads, head dim) of layers


@pytest.mark.parametrize("family", FAMILIES)
def test_one_sequence(family: str) -> None:
    with attach(model_of(family)) as session:
        long = generate(model_of(family), prompt(), steps=64)
        got = generate(model_of(family), prompt())
        assert {r.layer for r in session.report().layers} == {0, 1, 2, 3}
    assert torch.equal(long.tokens, generate(model_of(family), prompt(), steps=64).tokens)
    assert_same_answer(got, eager_one(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", [CacheConfig(), CacheConfig("paged", page=8)], ids=["contiguous", "paged"])
def test_left_padded_batch_in_chunks(family: str, cache: CacheConfig) -> None:
    tokens, mask = padded_batch()
    with attach(model_of(family), cache=cache) as session:
        whole = generate(model_of(family), tokens, mask)
        chunks = generate(model_of(family), tokens, mask, prefill_chunk_size=13)
        mine = longreach.generate(session, tokens, mask, max_new_tokens=24)
    assert_same_answer(whole, eager_batch(family))
    assert torch.equal(chunks.tokens, whole.tokens) and torch.equal(mine.tokens, whole.tokens)


@pytest.mark.parametrize("decode", [StreamingLLM(window=4096), Quest(k=1.0, dense_layers=()), MAC()], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_methods_that_read_all_keys(family: str, decode: Any) -> None:
    tokens, mask = padded_batch()
    with attach(model_of(family), decode=decode) as session:
        got = generate(model_of(family), tokens, mask, steps=64)
        rows = {r.layer: r.method for r in session.report().layers if r.phase == "decode"}
    assert torch.equal(got.tokens, generate(model_of(family), tokens, mask, steps=64).tokens)
    assert rows == {0: "dense", 1: decode.name, 2: "dense", 3: decode.name}


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_choose_keys(method: str) -> None:
    """Each runs in the layers without a window, also with a plan of the prompt, or is refused by name."""
    options = {"mac": "mac min_context=64 window=64 band=32", "kascade": "kascade k=0.1 min_keys=16"}
    model = model_of("gemma4")
    with attach(model, decode=options.get(method, method)) as session:
        got = generate(model, random_tokens(1, 2200), steps=8)
        report = session.report()
    assert bool(got.logits.isfinite().all())
    assert {r.layer: r.method for r in report.layers if r.phase == "decode"}[3] == method
    assert all(plan.source in ("prompt", "cache") for plan in report.plans)
    assert len(report.plans) == (method in ("kascade", "loki"))


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_is_that_of_each_layer(family: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from longreach.cli.main import main

    path, model = save_tiny(tmp_path, family), model_of(family)
    found = inspect_model(path)
    assert found.refused is None and found.shape is not None and found.shape.by_layer == HEADS[family]
    assert found.windows == {0: 16, 2: 16}
    with attach(model, decode=Quest(dense_layers=()), cache=CacheConfig(capacity=96)) as session:
        cache = session.new_cache(2)
        generate(model, random_tokens(2, 30), steps=4, past_key_values=cache)
        assert cache.kv.nbytes == found.kv_bytes(96, batch=2, element=4)
        held = cache.states.nbytes
    planned = Quest(dense_layers=()).state_bytes(found.shape, 2, 96, torch.float32)
    windows = sum(heads * dim for heads, dim in HEADS[family][::2])
    both = sum(heads * dim for heads, dim in HEADS[family])
    assert held == planned * (both - windows) // both  # layers with a window keep no state, but are counted
    assert main(["check", str(path)]) == 0
    heads, dim = HEADS[family][1]
    assert f"4 query and 2 KV heads of 16 or {heads} KV heads of {dim}" in " ".join(capsys.readouterr().out.split())


def test_bytes_are_those_of_each_layer() -> None:
    with attach(model_of("gemma4")) as session:
        generate(model_of("gemma4"), prompt(), steps=2)
        bytes_of = {r.layer: r.dense_bytes for r in session.report().layers if r.phase == "decode"}
    assert bytes_of == {0: 16 * 2 * 2 * 16 * 4, 1: 41 * 2 * 32 * 4, 2: 16 * 2 * 2 * 16 * 4, 3: 41 * 2 * 32 * 4}


def test_caches_are_copied_cut_evicted_and_saved(tmp_path: Any) -> None:
    model, more = model_of("gemma4"), random_tokens(1, 3, seed=5)

    def read(cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, past_key_values=cache, use_cache=True).logits

    with attach(model, decode=Quest(dense_layers=())) as session:
        cache = session.new_cache()
        read(cache, prompt())
        cache.save(tmp_path / "cache.safetensors")
        loaded, copied = session.load_cache(tmp_path / "cache.safetensors"), cache.copy()
        want = read(cache, more)
        assert torch.equal(read(loaded, more), want) and torch.equal(read(copied, more), want)
        cache.crop(-3)
        assert torch.equal(read(cache, more), want)
    with attach(model, evict="snapkv capacity=16 window=4") as session:
        cache = session.new_cache()
        generate(model, prompt(), steps=8, past_key_values=cache)
        assert [cache.kv.slots_in_use(n)[0] for n in range(4)] == [47, 16 + 7, 47, 16 + 7]


def test_the_hash_of_a_configuration_is_that_of_all_layers() -> None:
    one, other = (tiny_model("gemma4", global_head_dim=dim) for dim in (32, 48))
    assert shape_of(one).config != shape_of(other).config == config_hash(other.config)


# what is refused


def test_what_these_models_do_not_do() -> None:
    model = model_of("gemma4")
    with pytest.raises(Unsupported, match="keys whose shape differs by layer, which longreach does not store"):
        attach(model, fuse="full_reuse")
    with pytest.raises(Unsupported, match="host memory does not hold layers of different shapes"):
        attach(model, cache=CacheConfig(host=True))
    for dim in (512, 640):
        shape = shape_of(tiny_model("gemma4", global_head_dim=dim))
        if dim == 512:
            check_kernels("Gemma4ForCausalLM", shape, torch.device("cuda"), "auto")
            continue
        with pytest.raises(Unsupported, match="640 channels a head; the kernels for a GPU take up to 128 and 576"):
            check_kernels("Gemma4ForCausalLM", shape, torch.device("cuda"), "auto")


def test_other_differences_are_refused() -> None:
    with pytest.raises(Unsupported, match="shares keys and values between layers"):
        attach(tiny_model("gemma4", num_kv_shared_layers=2))
    config = AutoConfig.for_model(
        "gemma4_text", **{**SHAPE, **BY_LAYER["gemma4"][1], "per_layer_config": {1: {"head_dim": 32}}}
    )
    with pytest.raises(Unsupported, match="head_dim differ between layers without a sliding window"):
        shape_of_config(config)
