"""Every family: the original's logits at gate 0, decoding as in one pass, a round trip through AutoModel."""

from __future__ import annotations

import copy
import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import longreach
from longreach import mka
from longreach.adapters.transformers.mka import FAMILIES, PREFIX, convert, family
from longreach.errors import InvalidInput, ModelFileError, UnknownName
from longreach.testing.tiny import random_tokens, tiny_tokenizer
from tests.adapters.transformers.mka.models import (
    ALL,
    HASH,
    SMALL,
    THREE,
    TWO,
    close,
    converted,
    levels_of,
    opened,
    original,
)

mka.register()


def test_all_families_are_tested() -> None:
    assert set(ALL) == set(FAMILIES)


@pytest.mark.parametrize("options", [TWO, HASH], ids=["two", "hash"])
@pytest.mark.parametrize("name", ALL)
def test_gate_zero_gives_the_originals_logits(name: str, options: dict[str, Any]) -> None:
    tokens, base = random_tokens(2, 30), original(name)
    model = converted(name, seed=None, **options)
    for how in ("eager", "sdpa"):
        base.set_attn_implementation(how)
        model.set_attn_implementation(how)
        assert torch.equal(model(tokens).logits, base(tokens).logits)
    base.set_attn_implementation("eager")
    assert type(model.config).model_type == PREFIX + name


@torch.no_grad()
@pytest.mark.parametrize("options", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("name", ALL)
def test_decoding_equals_one_pass(name: str, options: dict[str, Any]) -> None:
    model, tokens = converted(name, **options), random_tokens(2, 30)
    want = model(tokens, use_cache=False).logits
    assert not torch.allclose(want, original(name)(tokens).logits, atol=0.1)
    cache = DynamicCache(config=model.config)
    cuts = [0, 13, 14, 15, 22, *range(23, 31)]
    parts = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in pairwise(cuts)]
    close(torch.cat(parts, 1), want)


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_round_trip(name: str, tmp_path: Path) -> None:
    """Also of a model whose original was loaded: files hold experts one by one, memory holds them together."""
    original(name).save_pretrained(tmp_path / "original")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "original", attn_implementation="eager")
    model = opened(convert(loaded, "fastmka", **HASH))
    tokens = random_tokens(1, 30)
    want = model(tokens).logits
    model.save_pretrained(tmp_path / "new")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new", attn_implementation="eager")
    assert type(again) is type(model) is family(name).model
    assert torch.equal(again(tokens).logits, want)
    assert again.config.mka == model.config.mka and again.config.mka["recall"] == "hash"


def test_a_saved_model_is_not_loaded_without_longreach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "longreach_mka_llama"
    for name in FAMILIES:
        monkeypatch.delitem(CONFIG_MAPPING._extra_content, PREFIX + name)  # as in a process without register()
    with pytest.raises(ValueError, match="longreach_mka_llama"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
def test_load_needs_no_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted(layers=[1])
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for name in FAMILIES:
        monkeypatch.delitem(CONFIG_MAPPING._extra_content, PREFIX + name)
    loaded, tokenizer = longreach.load(tmp_path)
    tokens = random_tokens(1, 20)
    close(loaded(tokens).logits, model(tokens).logits)  # sdpa and eager
    assert levels_of(loaded).keys() == {1}
    assert tokenizer("ab").input_ids == AutoTokenizer.from_pretrained(tmp_path)("ab").input_ids


@pytest.mark.parametrize("lost", ["planes", "router.gate.bias", "decay.bias", "router.up.weight"])
def test_a_checkpoint_without_weights_of_mka_is_refused(lost: str, tmp_path: Path) -> None:
    model = converted(**{**HASH, "summary": "ema"})
    state = {name: x for name, x in model.state_dict().items() if name != f"model.layers.1.self_attn.mka.{lost}"}
    assert len(state) == len(model.state_dict()) - 1
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelFileError, match=rf"1 tensors of MKA are missing.*layers\.1\.self_attn\.mka\.{lost}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelFileError, match="tensors of MKA are missing"):
        longreach.load(tmp_path)


def test_a_config_of_fewer_layers_than_the_weights_is_refused(tmp_path: Path) -> None:
    converted("llama", "block_mka", **SMALL).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["mka"]["layers"] = [0]
    path.write_text(json.dumps(fields))
    with pytest.raises(ModelFileError, match=r"5 tensors of MKA belong to no layer.*layers\.1\.self_attn\.mka\.router"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_checkpoint_of_the_original_is_refused(tmp_path: Path) -> None:
    original("llama").save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=r"config\.mka: expected the options of MKA"):
        family("llama").model.from_pretrained(tmp_path)
    config = family("llama").config(**{**original("llama").config.to_dict(), "mka": {"variant": "fastmka"}})
    with pytest.raises(ModelFileError, match=r"12 tensors of MKA are missing"):
        family("llama").model.from_pretrained(tmp_path, config=config)


def test_from_config_makes_a_model_to_train() -> None:
    fields = {**original("llama").config.to_dict(), "model_type": "longreach_mka_llama"}
    config = AutoConfig.for_model(**fields, mka={"variant": "fastmka", "tiers": [1, 2, 3], "decay": 0.9})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for levels in levels_of(model).values():
        assert levels.router.gate.bias.tolist() == [1.0, 1.0, 1.0]
        assert torch.allclose(torch.sigmoid(levels.decay.bias.float()), torch.tensor(0.9), atol=2e-3)
        assert levels.router.up.weight.float().std() > 0.1 and not levels.router.up.bias.any()
        assert {x.dtype for x in levels.parameters()} == {torch.bfloat16}
    assert model(random_tokens(1, 5)).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (None, InvalidInput, "config.mka: expected the options of MKA"),
        ({}, InvalidInput, "expected a variant"),
        ({"variant": "fastmka", "blok": 4}, UnknownName, "unknown option of MKA 'blok'"),
        ({"variant": "fastmka", "layers": [0, 7]}, InvalidInput, "layer 7 does not exist"),
    ],
)
def test_options_of_a_config_are_checked(options: Any, error: type[Exception], message: str) -> None:
    config = family("llama").config(**{**original("llama").config.to_dict(), "mka": options})
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_config(config)


def test_planes_keep_their_numbers_in_fp16(tmp_path: Path) -> None:
    model = converted(**HASH)
    model.save_pretrained(tmp_path)
    low = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    for layer, levels in levels_of(low).items():
        assert torch.equal(levels.planes.double(), levels_of(model)[layer].planes.double())
        assert levels.router.up.weight.dtype == torch.float16
    assert low(random_tokens(1, 30)).logits.isfinite().all()


@torch.no_grad()
def test_a_model_is_copied_and_pickled() -> None:
    model, tokens = converted(**THREE), random_tokens(1, 20)
    want = model(tokens).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens).logits, want)
        for levels in levels_of(other).values():
            levels.router.gate.bias.zero_()
        assert torch.equal(other(tokens).logits, original("llama")(tokens).logits)
        assert torch.equal(model(tokens).logits, want)


def test_hidden_states_and_attentions_are_still_given() -> None:
    out = converted()(random_tokens(1, 7), output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 3 and out.attentions[1].shape == (1, 4, 7, 7)
