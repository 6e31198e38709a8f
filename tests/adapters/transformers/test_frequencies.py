"""The frequencies of a model's rotation, in every family; refused by name where they depend on lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from longreach import Dense, attach
from longreach.errors import Unsupported
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.ops import RotaryFrequencies
from longreach.testing.tiny import FAMILIES, from_config, tiny_model
from tests.adapters.transformers.reference import generate, model_of, padded_batch, prompt


@dataclass(frozen=True)
class Knowing(Dense):
    """Dense attention that also needs the frequencies."""

    needs_frequencies = True

    def run(self, call: LayerCall, state: Any) -> Outcome:
        known, cos = call.frequencies(), call.rotary().cos  # type: ignore[misc]
        assert known.inv_freq.dtype == torch.float32 and known.inv_freq.shape == cos.shape[-1:]
        plain, _ = call.pre_rope()  # type: ignore[misc]
        turned = known.turn(plain, call.rows.pos[:, None])
        rotated = 2 * len(known.inv_freq)
        size = (cos**2 + call.rotary().sin ** 2).sqrt().mean()  # type: ignore[misc]
        turned[..., :rotated] *= size
        torch.testing.assert_close(turned, call.rows.q.float(), rtol=1e-3, atol=1e-3 * float(plain.abs().max()))
        return super().run(call, state)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_turned_by_the_frequencies_are_the_models(family: str) -> None:
    """In a left-padded prompt and in every step; with linear, Llama 3 and YaRN scaling too."""
    model, (tokens, mask) = model_of(family), padded_batch((20, 9))
    with attach(model, prefill=Knowing(), decode=Knowing()) as session:
        generate(model, tokens, mask, steps=4)
    assert session.facts.frequencies or family == "mistral", "only layers with a sliding window run no method"
    for known in session.facts.frequencies.values():
        assert bool((known.inv_freq > 0).all()) and float(known.inv_freq.max()) <= 1.01


def test_linear_scaling() -> None:
    parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=parameters)
    with attach(model, prefill=Knowing(), decode=Knowing()) as session:
        generate(model, prompt(), steps=2)
    assert float(session.facts.frequencies[0].inv_freq[0]) == pytest.approx(0.25)


def test_in_bf16() -> None:
    model = tiny_model("llama").bfloat16()
    seen: list[RotaryFrequencies] = []

    @dataclass(frozen=True)
    class Noting(Knowing):
        def run(self, call: LayerCall, state: Any) -> Outcome:
            seen.append(call.frequencies())  # type: ignore[misc]
            return Dense.run(self, call, state)

    with attach(model, prefill=Noting()):
        model(prompt(300))
    exact = 10000.0 ** (-torch.arange(8) / 8)
    torch.testing.assert_close(seen[0].inv_freq, exact, rtol=2**-7, atol=0)  # the model rounds its own to bf16


def test_frequencies_that_differ_by_type_of_layer() -> None:
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.2, eos_token_id=None, pad_token_id=256, bos_token_id=257,
    )  # fmt: skip
    model = from_config(config)
    with attach(model, prefill=Knowing(), decode=Knowing()) as session:
        generate(model, prompt(), steps=2)
    assert set(session.facts.frequencies) == {1}, "a method does not run in a layer with a sliding window"
    base = config.rope_parameters["full_attention"]["rope_theta"]
    torch.testing.assert_close(session.facts.frequencies[1].inv_freq, base ** (-torch.arange(8) / 8))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_lengths_are_refused_by_name(kind: str) -> None:
    more: dict[str, Any] = {"original_max_position_embeddings": 64, "factor": 4.0}
    if kind == "longrope":
        more |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = tiny_model("llama", rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **more})
    with pytest.raises(Unsupported, match=f"has a rotary embedding of type '{kind}'"):
        attach(model, decode=Knowing())
    with attach(model) as session, pytest.raises(Unsupported, match=f"of type '{kind}'"):
        session.switch(Knowing())


def test_models_without_rotation_are_refused_by_name() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=264, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)
    with pytest.raises(Unsupported, match="GPT2LMHeadModel has no rotary embedding, and a method needs its freq"):
        attach(from_config(config), prefill=Knowing())


def test_a_model_without_a_rotary_module_is_refused_by_name() -> None:
    model = tiny_model("llama")
    model.model.turn = model.model.rotary_emb
    del model.model.rotary_emb
    with pytest.raises(Unsupported, match="LlamaForCausalLM has no module 'rotary_emb'"):
        attach(model, prefill=Knowing())


def test_other_angles_than_the_layers_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    plain = type(model.model.rotary_emb).forward

    def shrinking(self: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return plain(self, x, position_ids / position_ids.shape[1])

    monkeypatch.setattr(type(model.model.rotary_emb), "forward", shrinking)
    with attach(model, prefill=Knowing()), pytest.raises(Unsupported, match="layer 0 is rotated by other angles than"):
        model(prompt())


def test_a_method_may_be_switched_to() -> None:
    model = model_of("llama")
    with attach(model) as session:
        session.switch(Knowing())
        generate(model, prompt(), steps=4)
        assert len(session.facts.frequencies) == 2
