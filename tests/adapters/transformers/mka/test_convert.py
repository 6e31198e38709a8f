"""convert and revert: what they change, and what they refuse with the model unchanged."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import longreach
from longreach import mka
from longreach.adapters.transformers.mka import convert, revert
from longreach.errors import ConcurrentUse, InvalidInput, LongreachError, UnknownName, Unsupported
from longreach.testing.tiny import random_tokens, tiny_model
from tests.adapters.transformers.mka.models import HASH, SMALL, converted, levels_of, opened, original


def test_it_changes_the_model_in_place() -> None:
    base = copy.deepcopy(original("llama")).train()
    config, weights = base.config, dict(base.named_parameters())
    other = type(base)(config)  # shares the config object
    model = convert(base, "fastmka", layers=[1], decay=0.9, gate=0.25)
    assert model is base and isinstance(model, type(original("llama")))
    kept = dict(model.named_parameters())
    assert all(kept[name] is x for name, x in weights.items())
    added = kept.keys() - weights.keys()
    assert added and all(name.startswith("model.layers.1.self_attn.mka.") for name in added)
    assert model.config is not config and config.model_type == "llama" and not hasattr(config, "mka")
    assert other.config is config and model.config.mka["layers"] == [1]
    (levels,) = levels_of(model).values()
    own = {id(m.config) for m in model.modules() if hasattr(m, "config")}
    assert own == {id(model.config), id(levels.config)}
    assert levels.router.gate.bias.tolist() == [0.25, 0.25] and levels.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_have_the_dtype_of_the_projections(dtype: torch.dtype) -> None:
    model = convert(copy.deepcopy(original("llama")).to(dtype), "fastmka", **HASH)
    for levels in levels_of(model).values():
        assert {x.dtype for x in levels.parameters()} == {dtype}
        assert levels.planes.dtype == torch.bfloat16
    tokens = random_tokens(1, 20)
    assert torch.equal(model(tokens).logits, copy.deepcopy(original("llama")).to(dtype)(tokens).logits)


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3_moe"])
def test_revert_gives_the_original_back(name: str) -> None:
    base, tokens = original(name), random_tokens(2, 20)
    model = converted(name, seed=None, layers=[1])
    with torch.no_grad():
        model(tokens)
    assert revert(model) is model and type(model) is type(base)
    assert [type(m) for m in model.modules()] == [type(m) for m in base.modules()]
    assert model.config.to_dict() == base.config.to_dict()
    assert model.state_dict().keys() == base.state_dict().keys()
    assert not model.get_decoder()._forward_pre_hooks and not model.get_decoder()._forward_pre_hooks_with_kwargs
    assert torch.equal(model(tokens).logits, base(tokens).logits)
    again = convert(model, "fastmka", **HASH)
    assert torch.equal(again(tokens).logits, base(tokens).logits)


def test_revert_of_a_loaded_model(tmp_path: Any) -> None:
    mka.register()
    converted("llama", seed=None).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = random_tokens(1, 20)
    revert(model).save_pretrained(tmp_path / "reverted")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "reverted", attn_implementation="eager")
    assert type(again) is type(original("llama")) and again.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(again(tokens).logits, original("llama")(tokens).logits)


def test_revert_with_open_gates_names_the_layers() -> None:
    model, tokens = converted(), random_tokens(1, 20)
    with torch.no_grad():
        levels_of(model)[0].router.gate.bias.zero_()
        levels_of(model)[1].router.gate.bias.copy_(torch.tensor([0.0, 1e-3]))
    want = model(tokens).logits
    with pytest.raises(InvalidInput, match=r"gates of layers \[1\] are not 0"):
        revert(model)
    assert torch.equal(model(tokens).logits, want)


def test_revert_of_other_models() -> None:
    with pytest.raises(InvalidInput, match="expected a model with MKA's layers"):
        revert(original("llama"))
    model = converted(seed=None)
    with longreach.attach(model), pytest.raises(ConcurrentUse, match="has longreach attached"):
        revert(model)


def _quantised() -> Any:
    model: Any = copy.deepcopy(original("llama"))
    model.is_quantized = True
    return model


def _integers() -> Any:
    model = copy.deepcopy(original("llama"))
    projection: Any = model.model.layers[1].self_attn.q_proj
    projection.weight = nn.Parameter(projection.weight.data.to(torch.int8), requires_grad=False)
    return model


def _compiled_layer() -> Any:
    model = copy.deepcopy(original("llama"))
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


def _compiled_in_place() -> Any:
    model = copy.deepcopy(original("llama"))
    model.compile()
    return model


def _compiled_forward() -> Any:
    model: Any = copy.deepcopy(original("llama"))
    model.forward = torch.compile(model.forward)
    return model


def _dynamically_quantised() -> Any:
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(original("llama")), {nn.Linear}, dtype=torch.qint8)


def _forward_of_its_own() -> Any:
    model = copy.deepcopy(original("llama"))
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward
    return model


def _on_meta() -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(original("llama").config)


def _latent_attention() -> Any:
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=99, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2,
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def _subclass() -> Any:
    model = copy.deepcopy(original("llama"))
    model.__class__ = type("MyLlama", (type(model),), {})
    return model


MODELS: list[tuple[Callable[[], Any], type[LongreachError], str]] = [
    (lambda: nn.Linear(2, 2), InvalidInput, "expected a transformers model, got Linear"),
    (lambda: None, InvalidInput, "expected a transformers model, got NoneType"),
    (lambda: "mini", InvalidInput, "expected a transformers model, got str"),
    (lambda: nn.DataParallel(copy.deepcopy(original("llama"))), Unsupported, "got one wrapped by DataParallel"),
    (lambda: torch.compile(copy.deepcopy(original("llama"))), Unsupported, "wrapped by torch.compile"),
    (_compiled_layer, Unsupported, "layers of LlamaForCausalLM are compiled"),
    (_compiled_in_place, Unsupported, "LlamaForCausalLM is compiled"),
    (_compiled_forward, Unsupported, "LlamaForCausalLM is compiled; convert it before torch.compile"),
    (_quantised, Unsupported, "LlamaForCausalLM is quantised"),
    (_integers, Unsupported, "layer 1 has weights of torch.int8 (quantised?)"),
    (_dynamically_quantised, Unsupported, "layer 0 has no weights, but torch.ao.nn.quantized.dynamic"),
    (_forward_of_its_own, Unsupported, "layer 1 has a forward of its own"),
    (_on_meta, Unsupported, "layer 0 has its weights on the meta device"),
    (_latent_attention, UnknownName, "unknown family of models for MKA 'deepseek_v3'; known: llama, mistral"),
    (lambda: tiny_model("gemma2"), UnknownName, "unknown family of models for MKA 'gemma2'"),
    (lambda: copy.deepcopy(original("llama")).model, Unsupported, "expected a LlamaForCausalLM, got a LlamaModel"),
    (_subclass, Unsupported, "expected a LlamaForCausalLM, got a MyLlama"),
    (converted, InvalidInput, "the model has MKA's layers already (variant 'fastmka')"),
    (lambda: tiny_model("mistral"), Unsupported, "layers [0, 1] of MistralForCausalLM have a sliding window"),
    (lambda: tiny_model("qwen2"), Unsupported, "layers [1] of Qwen2ForCausalLM have a sliding window"),
]


@pytest.mark.parametrize(("make", "error", "message"), MODELS)
def test_models_that_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.ao.quantization
        model = make()
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    kinds, config = [type(m) for m in modules], getattr(model, "config", None)
    before = None if config is None else dict(vars(config))
    with pytest.raises(error, match=re.escape(message)):
        convert(model, "fastmka")
    assert [type(m) for m in modules] == kinds and getattr(model, "config", None) is config
    assert config is None or vars(config) == before


def test_an_attached_model_is_refused() -> None:
    model = copy.deepcopy(original("llama"))
    with longreach.attach(model), pytest.raises(ConcurrentUse, match="has longreach attached"):
        convert(model, "fastmka")
    convert(model, "fastmka")


def test_layers_leave_sliding_windows_out() -> None:
    model, tokens = tiny_model("qwen2"), random_tokens(1, 40)
    base = copy.deepcopy(model)
    convert(model, "fastmka", layers=[0])
    assert torch.equal(model(tokens).logits, base(tokens).logits)
    opened(model)
    with torch.no_grad():
        want = model(tokens, use_cache=False).logits
        out = model(tokens[:, :25])
        for n in range(25, 40):
            out = model(tokens[:, n : n + 1], past_key_values=out.past_key_values)
        assert torch.allclose(out.logits[:, 0], want[:, -1], atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "options", "error", "message"),
    [
        ("slowmka", {}, UnknownName, "unknown MKA variant 'slowmka'; known: fastmka, mka, block_mka"),
        ("fastmka", {"blok": 4}, UnknownName, "unknown option of fastmka 'blok'; known: tiers, block"),
        ("fastmka", {"layers": [2]}, InvalidInput, "layers: layer 2 does not exist, the model has layers 0 to 1"),
        ("fastmka", {"layers": []}, InvalidInput, "layers: expected at least one layer"),
        ("fastmka", {"layers": 1}, InvalidInput, "layers: expected layer numbers, ascending, such as [0, 2], got 1"),
        ("fastmka", {"layers": [0, 0]}, InvalidInput, "layers: expected layer numbers, ascending"),
        ("fastmka", {"gate": float("nan")}, InvalidInput, "gate: expected a finite number, got nan"),
        ("fastmka", {"gate": True}, InvalidInput, "gate: expected a finite number, got True"),
        ("fastmka", {"decay": 1.0}, InvalidInput, "decay: expected a float from 3.1e-07 to 1 - 3.1e-07"),
        ("fastmka", {"block": 4}, InvalidInput, "block: without effect in fastmka with tiers (1, 2)"),
        ("fastmka", {"tiers": (1, 2, 3), **SMALL, "recall": "index"}, InvalidInput, "'summary' or 'hash'"),
        ("block_mka", {"block": 4, "window": 6}, InvalidInput, "window: expected a multiple of block=4, got 6"),
        ("block_mka", {"blocks": 0}, InvalidInput, "blocks: expected a count >= 1, got 0"),
        ("block_mka", {"block": 0}, InvalidInput, "block: expected a count >= 1, got 0"),
        ("block_mka", {"tiers": 3}, InvalidInput, "tiers: expected a list of (1, 2, 3)"),
    ],
)
def test_options_that_are_refused(variant: str, options: Any, error: type[Exception], message: str) -> None:
    model = copy.deepcopy(original("llama"))
    with pytest.raises(error, match=re.escape(message)):
        convert(model, variant, **options)
    assert type(model) is type(original("llama")) and not levels_of(model)


def test_the_front_doors() -> None:
    assert longreach.convert is convert and longreach.mka is mka
    assert mka.revert is revert and mka.MKAConfig.make("fastmka").tiers == (1, 2)
    assert set(dir(mka)) == set(mka.__all__)
    with pytest.raises(AttributeError, match=r"'longreach\.mka' has no attribute 'regster'; it has: MKAConfig"):
        _ = mka.regster
