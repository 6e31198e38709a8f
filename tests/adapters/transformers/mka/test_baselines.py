"""Baselines made from pretrained models: repeated and averaged KV heads, MLA by SVD."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import longreach
from longreach.adapters.transformers.mka import convert, register
from longreach.adapters.transformers.mka.baselines import LatentAttention, still
from longreach.adapters.transformers.mka.rotation import layout_of
from longreach.errors import InvalidInput, LongreachError, ModelFileError, UnknownName, Unsupported
from longreach.testing.tiny import random_tokens, tiny_model

FAMILIES = ("llama", "qwen2", "qwen3", "glm4")
NO_WINDOW = {"qwen2": {"use_sliding_window": False, "sliding_window": None}}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(random_tokens(2, 21)).logits


def made(family: str) -> torch.nn.Module:
    return tiny_model(family, **NO_WINDOW.get(family, {}))


@pytest.mark.parametrize("family", [*FAMILIES, "phi3"])
def test_repeated_heads_give_the_same_logits(family: str, tmp_path: Path) -> None:
    model = made(family)
    before = logits(model)
    assert convert(model, "mha") is model and model.config.num_key_value_heads == 4
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_averaged_heads(family: str) -> None:
    model, mqa = made(family), made(family)
    convert(convert(model, "mha"), "gqa", kv_heads=2)  # back again
    torch.testing.assert_close(logits(model), logits(made(family)), rtol=1e-4, atol=1e-4)
    convert(mqa, "mqa")
    assert mqa.config.num_key_value_heads == 1 and not torch.allclose(logits(mqa), logits(model), atol=1e-2)
    out = mqa.generate(random_tokens(1, 9), max_new_tokens=4, do_sample=False, use_cache=True)
    assert torch.equal(out, mqa.generate(random_tokens(1, 9), max_new_tokens=4, do_sample=False, use_cache=False))


def test_methods_that_need_frequencies_refuse_mla() -> None:
    model = convert(made("llama"), "mla")
    with (
        longreach.attach(model, decode=longreach.BlockMKA(block=4, window=8, recall="summary")),
        pytest.raises(Unsupported, match="is MLA, which rotates its keys in part"),
    ):
        model.generate(random_tokens(1, 30), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_mla(family: str, tmp_path: Path) -> None:
    model = made(family)
    layout, rotary = layout_of(model.get_decoder())
    assert (layout, rotary) == (("interleaved", 8) if family == "glm4" else ("half", 16))
    before = logits(model)
    whole = convert(made(family), "mla", rank=2 * (16 - rotary) + 2 * 16, rotated=rotary)  # all pairs turn
    torch.testing.assert_close(logits(whole), before, rtol=1e-3, atol=1e-3)
    convert(model, "mla")
    module = model.model.layers[0].self_attn
    assert isinstance(module, LatentAttention) and module.mla.cached == 32  # half of 2 heads x 2 x 16
    ids = random_tokens(1, 9)
    out = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))
    with longreach.attach(model):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), out)
    register()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(logits(again), logits(model)) and again.config.mla == model.config.mla
    weights = load_file(tmp_path / "model.safetensors")
    up = weights.pop("model.layers.1.self_attn.mla.up.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"1 tensors of MLA are missing .*longreach\.convert"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    weights["model.layers.1.self_attn.mla.up.weight"] = up[:4].contiguous()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"1 tensors of MLA have another shape .*longreach\.convert"):
        AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_mla_trains() -> None:
    model = convert(made("llama"), "mla")
    model(random_tokens(2, 9), labels=random_tokens(2, 9)).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if ".mla." in n)


def test_pairs_that_do_not_turn_keep_their_scaling() -> None:
    angle = torch.rand(1, 3, 4)
    cos, sin = (1.2 * torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    got = still(cos, sin, 1)
    turns = torch.tensor([True, False, False, False] * 2)
    assert torch.equal(got[0][..., turns], cos[..., turns]) and torch.equal(got[1][..., turns], sin[..., turns])
    torch.testing.assert_close(got[0][..., ~turns], torch.full((1, 3, 6), 1.2))
    assert bool((got[1][..., ~turns] == 0).all())


def test_what_does_not_fit_is_refused() -> None:
    model = made("llama")
    before = logits(model)
    for kind, options, message in (
        ("mhq", {}, "mhq"),
        ("mha", {"heads": 4}, "heads"),
        ("gqa", {"kv_heads": 2, "layers": [0]}, "all layers"),
        ("gqa", {}, "kv_heads: gqa needs a number of KV heads"),
        ("gqa", {"kv_heads": 3}, "kv_heads: expected a divisor"),
        ("mqa", {"kv_heads": 2}, "kv_heads: mqa has 1"),
        ("mha", {"rank": 3}, "options of mla"),
        ("mla", {"kv_heads": 2}, "option of gqa"),
        ("mla", {"rank": 10**6}, "rank: expected 1 to"),
        ("mla", {"rotated": 18}, "rotated: expected at most"),
    ):
        with pytest.raises(LongreachError, match=message):
            convert(model, kind, **options)
    assert torch.equal(logits(model), before)
    with pytest.raises(UnknownName, match=r"phi3.*llama"):
        convert(made("phi3"), "mla")
    with pytest.raises(UnknownName, match="gemma2"):
        convert(tiny_model("gemma2"), "mha")
    convert(model, "mla")
    with pytest.raises(InvalidInput, match="converted to MLA already"):
        convert(model, "mla")
