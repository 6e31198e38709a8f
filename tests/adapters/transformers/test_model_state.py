"""A decode step is made anew when the model has changed in a way that a captured graph cannot follow, else kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longreach import attach, generate
from longreach.adapters.transformers.loop.model_state import model_state
from longreach.testing.tiny import random_tokens, tiny_model

NEW = 5


def scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


def norm(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.1


def rotary(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)


def weight(model: Any) -> None:
    down = model.model.layers[1].mlp.down_proj
    down.weight = nn.Parameter(down.weight * 2)


def module(model: Any) -> None:
    layer = model.model.layers[0]
    layer.mlp.act_fn = nn.GELU()


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(2)


def answers(model: Any, change: Callable[[Any], None]) -> tuple[Tensor, Tensor, bool]:
    """Tokens after a change in the session and by transformers, and whether the step is the one before."""
    tokens = random_tokens(1, 30)
    with attach(model) as session:
        generate(session, tokens, max_new_tokens=NEW, eos_token_id=())
        (before,) = session.static_caches[1].decoders.values()
        change(model)
        got = generate(session, tokens, max_new_tokens=NEW, eos_token_id=())
        (after,) = session.static_caches[1].decoders.values()
    want = model.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return got.sequences, want, after is before


@pytest.mark.parametrize("change", [scaling, norm, rotary, hook, weight, module])
def test_a_changed_model_gets_a_new_step(change: Callable[[Any], None]) -> None:
    got, want, same = answers(tiny_model("llama"), change)
    assert not same and torch.equal(got, want)


@pytest.mark.parametrize("change", [in_place, lambda model: model(random_tokens(1, 9))])
def test_what_a_captured_step_follows_keeps_it(change: Callable[[Any], None]) -> None:
    got, want, same = answers(tiny_model("llama"), change)
    assert same and torch.equal(got, want)


def test_adapters_in_use_and_their_scaling() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("llama")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(base, config, "one")
    model.add_adapter("two", config)
    seen = {model_state(base)}
    for change in (
        lambda: model.set_adapter("two"),
        lambda: model.base_model.disable_adapter_layers(),
        lambda: model.base_model.enable_adapter_layers(),
        lambda: base.model.layers[0].self_attn.q_proj.scaling.update(two=3.0),
    ):
        change()
        seen.add(model_state(base))
    assert len(seen) == 4  # enabled again it is as it was
