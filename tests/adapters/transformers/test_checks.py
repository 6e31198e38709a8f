"""Models that need what longreach lacks are refused by name when it is attached, and left untouched."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DynamicCache,
)

from longreach import Dense, OracleTopK, StreamingLLM, attach
from longreach.adapters.transformers import cache_name
from longreach.errors import ConcurrentUse, InvalidInput, UnknownName, Unsupported
from longreach.methods.call import ModelShape
from longreach.methods.model_config import config_hash
from longreach.testing.tiny import from_config, save_tiny, tiny_model
from tests.adapters.transformers.reference import generate, model_of, prompt

SMALL: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "eos_token_id": None, "pad_token_id": 256, "bos_token_id": 257,
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Bloom": ("bloom", {"vocab_size": 264, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "Bloom.*interface"),
    "MPT": ("mpt", {"vocab_size": 264, "d_model": 64, "n_layers": 2, "n_heads": 4}, "MptForCausalLM.*interface"),
    "Llama-4": ("llama4_text", {**SMALL, "intermediate_size_mlp": 96, "num_local_experts": 2}, "chunked_attention"),
    "Mamba": ("mamba", {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2}, "MambaForCausalLM.*interface"),
}  # fmt: skip


def _configs(model: Any) -> list[Any]:
    return [(m.config, m.config._attn_implementation) for m in model.modules() if hasattr(m, "config")]


@pytest.mark.parametrize("name", REFUSED)
def test_models_are_refused_by_name_and_left_untouched(name: str) -> None:
    kind, fields, message = REFUSED[name]
    model = from_config(AutoConfig.for_model(kind, **fields))
    before, attributes = _configs(model), {id(m): dict(vars(m)) for m in model.modules()}
    with pytest.raises(Unsupported, match=message):
        attach(model)
    assert _configs(model) == before
    assert all(vars(m).keys() == attributes[id(m)].keys() for m in model.modules())


def test_encoder_decoders_are_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=264, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4)
    with pytest.raises(Unsupported, match="T5ForConditionalGeneration is an encoder-decoder"):
        attach(from_config(config, auto=AutoModelForSeq2SeqLM))


def test_keys_shared_between_layers_are_refused() -> None:
    model = tiny_model("llama")
    model.config.num_kv_shared_layers = 1
    with pytest.raises(Unsupported, match="shares keys and values between layers"):
        attach(model)


def test_recurrent_layers_are_refused() -> None:
    model = tiny_model("llama")
    model.model._is_stateful = True
    with pytest.raises(Unsupported, match="recurrent layers"):
        attach(model)


def test_keys_changed_after_caching_are_refused() -> None:
    """JetMoE repeats its keys between cache and attention."""
    model = from_config(AutoConfig.for_model("jetmoe", **{**SMALL, "num_local_experts": 4, "kv_channels": 16}))
    with attach(model), pytest.raises(Unsupported, match="JetMoeAttention attends to other keys"):
        model(prompt())


def test_a_model_whose_cache_and_mask_disagree_is_refused() -> None:
    """Moshi's cache keeps a window which its mask does not have: its answers depend on use_cache."""
    model = from_config(AutoConfig.for_model("moshi", **{**SMALL, "ffn_dim": 96, "head_dim": 16, "sliding_window": 16}))
    with attach(model):
        model(prompt(16), attention_mask=torch.ones(1, 16))
        with pytest.raises(Unsupported, match="caches a window of 16 tokens, but its mask is causal"):
            model(prompt(17), attention_mask=torch.ones(1, 17))


def test_a_model_on_two_devices_is_refused() -> None:
    model = tiny_model("llama")
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1, "lm_head": "cpu"}
    with pytest.raises(Unsupported, match="spread over 0, 1, cpu by device_map"):
        attach(model)
    model.hf_device_map = {"": "cpu"}
    with attach(model):
        model(prompt())
    del model.hf_device_map
    model.model.layers[1].to("meta")
    with pytest.raises(Unsupported, match="weights on the meta device"):
        attach(model)


def test_models_that_transformers_itself_has_spread(tmp_path: Path) -> None:
    """By device_map, as accelerate does it: attached to where whole on one device, refused where offloaded in part."""
    path = save_tiny(tmp_path / "model", eos_token_id=None)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu",
              "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}  # fmt: skip
    whole, spread = (
        AutoModelForCausalLM.from_pretrained(path, device_map=where, offload_folder=tmp_path, dtype=torch.float32)
        for where in ({"": "cpu"}, places)
    )
    want = spread(prompt()).logits
    with pytest.raises(Unsupported, match="spread over cpu, disk by device_map; load it on one device"):
        attach(spread)
    assert torch.equal(spread(prompt()).logits, want)
    with attach(whole):
        assert torch.allclose(whole(prompt()).logits, want, rtol=0, atol=1e-4)


def test_compiled_and_wrapped_models_are_refused() -> None:
    model = tiny_model("llama")
    for wrapped in (torch.compile(model, backend="eager"), nn.Sequential(model), nn.Linear(2, 2)):
        with pytest.raises(InvalidInput, match=f"expected a transformers model, got {type(wrapped).__name__}"):
            attach(wrapped)
    model.model.compile(backend="eager")
    with pytest.raises(Unsupported, match="compiled"):
        attach(model)


@torch.no_grad()
def test_an_attached_model_within_compiled_code_runs_uncompiled() -> None:
    model = model_of("llama")
    want = model(prompt()).logits
    with attach(model) as session:
        around = torch.compile(lambda tokens: model.model(tokens)[0] * 2, backend="eager")
        hidden = around(prompt())
        assert session.report().fraction("prefill") == 1.0
    torch.compiler.reset()
    assert torch.allclose(model.lm_head(hidden / 2), want, rtol=0, atol=1e-4)


def test_attention_weights_in_the_config_are_refused() -> None:
    model = tiny_model("llama")
    model.config.output_attentions = True
    with pytest.raises(Unsupported, match="output_attentions"):
        attach(model)


def test_unknown_names_list_the_known_ones() -> None:
    model = model_of("llama")
    with pytest.raises(UnknownName, match="unknown decode method 'nearest'; known: dense"):
        attach(model, decode="nearest")
    with pytest.raises(UnknownName, match="unknown prefill method 'oracle_top_k'"):
        attach(model, prefill="oracle_top_k")
    with pytest.raises(UnknownName, match="unknown evict method 'snap'; known: none"):
        attach(model, evict="snap")
    with pytest.raises(UnknownName, match="unknown impl of attend 'cuda'"):
        attach(model, impl="cuda")
    with pytest.raises(InvalidInput, match="expected a configured method of this slot or its name, got 3"):
        attach(model, decode=3)
    with pytest.raises(UnknownName, match="unknown option of attach 'decoder'; known: fuse, prefill, decode"):
        attach(model, decoder="quest")
    with attach(model):  # nothing of the failed attempts is left
        generate(model, prompt(), steps=2)


def test_methods_as_text_with_options() -> None:
    model = model_of("llama")
    with attach(model, prefill="streaming_llm window=9", decode="oracle_top_k k=3 heads=all") as session:
        assert session.prefill.window == 9 and (session.decode.k, session.decode.heads) == (3, "all")
    with pytest.raises(InvalidInput, match='stand in its text: write decode="oracle_top_k heads=all k=3"'):
        attach(model, decode="oracle_top_k heads=all", k=3)
    with pytest.raises(InvalidInput, match='write evict="snapkv capacity=8"'):
        attach(model, evict="snapkv", capacity=8)
    with pytest.raises(InvalidInput, match=r"decode: got the class OracleTopK.*write OracleTopK\(\) or decode="):
        attach(model, decode=OracleTopK)  # type: ignore[arg-type]


class Curious(Dense):
    """Notes the models it is asked about."""

    asked: ClassVar[list[ModelShape]] = []

    def check(self, model: ModelShape) -> None:
        self.asked.append(model)


def test_methods_are_asked_whether_their_options_fit_the_model() -> None:
    Curious.asked.clear()
    with attach(tiny_model("gemma2"), prefill=Curious(), decode=Curious()) as session:
        session.switch(Curious())
    with attach(tiny_model("llama", num_hidden_layers=3, num_key_value_heads=1, head_dim=None).model, decode=Curious()):
        pass
    plain = [dataclasses.replace(shape, config="") for shape in Curious.asked]
    assert plain == [ModelShape(2, 4, 2, 16)] * 3 + [ModelShape(3, 4, 1, 16)]


def test_a_configuration_is_known_by_what_makes_its_model_another() -> None:
    config = tiny_model("llama").model.config
    known = config_hash(config)
    assert len(known) == 64 and config_hash(copy.deepcopy(config)) == known
    for change in ({"num_key_value_heads": 1}, {"vocab_size": 7}, {"rope_parameters": {"rope_theta": 7.0}}):
        other = copy.deepcopy(config)
        for name, value in change.items():
            setattr(other, name, value)
        assert config_hash(other) != known
    other = copy.deepcopy(config)
    other.eos_token_id, other.use_cache, other.dtype = 1, False, "bfloat16"
    assert config_hash(other) == known


def test_options_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    model, beyond = model_of("llama"), OracleTopK(k=1, dense_layers=(0, 2))
    before = _configs(model), dict(vars(model))
    with pytest.raises(InvalidInput, match=r"dense_layers.*has 2 \(0 to 1\), got layer 2"):
        attach(model, decode=beyond)
    assert (_configs(model), dict(vars(model))) == before
    with attach(model, decode="streaming_llm") as session:
        generate(model, prompt(), steps=2)
        with pytest.raises(InvalidInput, match="got layer 2"):
            session.switch(beyond)
        assert session.decode == StreamingLLM()
        assert session.report().layers, "a switch that is refused counts on"
        session.switch("oracle_top_k", dense_layers=[0, 1])
        generate(model, prompt(), steps=2)
        assert session.report().layers[-1].dense_reasons == ("in dense_layers",)


def test_a_second_attach_is_refused() -> None:
    model = tiny_model("llama")
    twin = copy.copy(model)  # another head over the same decoder
    with attach(model):
        for again in (model, model.model, twin):
            with pytest.raises(ConcurrentUse, match="attached already"):
                attach(again)
        generate(model, prompt(), steps=2)
    with attach(model.model):
        pass


def test_models_that_share_a_config_are_refused_while_one_is_attached() -> None:
    """Restoring the first would take the second's attention away in mid-session."""
    model = tiny_model("llama")
    other = type(model)(model.config)
    with attach(model), pytest.raises(ConcurrentUse, match="shares its config"):
        attach(other)
    with attach(other):
        pass


def test_the_decoder_alone_can_be_attached() -> None:
    model = tiny_model("llama").model
    want = model(prompt()).last_hidden_state
    with attach(model) as session:
        got = model(prompt()).last_hidden_state
        assert session.report().fraction() == 1.0
    assert torch.allclose(got, want, rtol=0, atol=1e-4)


def test_other_heads_than_language_models() -> None:
    config = tiny_model("llama").config
    config.num_labels = 3
    model = from_config(config, auto=AutoModelForSequenceClassification)
    want = model(prompt()).logits
    with attach(model):
        assert torch.allclose(model(prompt()).logits, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", sorted({cache_name.OLD, cache_name.CACHE}))
@torch.no_grad()
def test_either_name_of_the_cache(name: str) -> None:
    """In a call of the model, of its decoder and of generate."""
    model = tiny_model("llama")
    want = model(prompt(30)).logits[:, -1]
    with attach(model) as session:
        cache = session.new_cache()
        for first in (0, 20):
            out = model(prompt(30)[:, first : first + 20], **{name: cache})
        assert cache.columns == 30 and torch.allclose(out.logits[:, -1], want, rtol=0, atol=1e-4)
        cache.crop(-10)
        model.model(prompt(30)[:, -10:], **{name: cache})
        model.generate(torch.cat([prompt(30), prompt(30)[:, :5]], 1), max_new_tokens=2, **{name: cache})
        assert cache.columns == 36
        with pytest.raises(Unsupported, match=f"{cache_name.CACHE}: longreach brings its own cache"):
            model.generate(prompt(30), max_new_tokens=2, **{name: DynamicCache()})
