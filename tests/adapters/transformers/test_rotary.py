"""Queries and keys before rotation are what the model's projections gave, in every family; no rotation, no method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from longreach import Dense, attach
from longreach.adapters.transformers import rotary
from longreach.errors import Unsupported
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.testing.tiny import FAMILIES, from_config, tiny_model
from tests.adapters.transformers.reference import generate, model_of, padded_batch, prompt

HEADS, KV_HEADS, DIM = 4, 2, 16


@dataclass(frozen=True)
class Asking(Dense):
    """Dense attention that also wants queries before rotation."""

    needs_pre_rope = True

    def run(self, call: LayerCall, state: Any) -> Outcome:
        queries, _ = call.pre_rope()
        rotary = call.rotary()
        assert torch.equal(rotary.undo(call.rows.q), queries)
        some = torch.arange(0, len(queries), 2)
        assert torch.equal(call.take(some).rotary().undo(call.rows.q[some]), queries[some])
        return super().run(call, state)


def _projections(model: PreTrainedModel) -> tuple[dict[tuple[int, str], Tensor], list[Any]]:
    """What comes out of the modules before rotation, by layer and "q" or "k": [B, T, heads, D]; and the hooks."""
    found: dict[tuple[int, str], Tensor] = {}
    hooks = []

    def note(layer: int, which: str, heads: int, first: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            part = out if out.dim() == 4 else out[..., first * DIM : (first + heads) * DIM].unflatten(-1, (heads, DIM))
            found[layer, which] = part

        return hook

    for layer in model.model.layers:
        attention, index = layer.self_attn, layer.self_attn.layer_idx
        for which, heads in (("q", HEADS), ("k", KV_HEADS)):
            module = getattr(attention, f"{which}_norm", None) or getattr(attention, f"{which}_proj", None)
            joint = module is None  # Phi-3
            first = HEADS if joint and which == "k" else 0
            source = attention.qkv_proj if joint else module
            hooks.append(source.register_forward_hook(note(index, which, heads, first)))
    return found, hooks


@pytest.mark.parametrize("family", FAMILIES)
def test_before_rotation_is_what_the_projections_gave(family: str) -> None:
    """In a left-padded prompt and in every step, sliding layers included."""
    model, (tokens, mask) = model_of(family), padded_batch((20, 9))
    found, hooks = _projections(model)
    checked, turned = set(), 0.0

    def compare(phase: str, call: LayerCall, outcome: Outcome) -> None:
        nonlocal turned
        real = mask.bool() if phase == "prefill" else torch.ones(2, 1, dtype=torch.bool)
        for which, got in zip("qk", call.pre_rope(), strict=True):
            want = found[call.layer, which][real]
            size = float(want.abs().max())
            # a turn and its inverse: a dozen roundings of the size of the largest channel
            assert torch.allclose(got, want, rtol=0, atol=12 * 2**-23 * size), (phase, call.layer, which)
            checked.add((phase, call.layer, which))
            turned = max(turned, float((want - call.rows.q).abs().max())) if which == "q" else turned

    try:
        with attach(model, prefill=Asking(), decode=Asking()) as session:
            session.on_layer = compare
            generate(model, tokens, mask, steps=4)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(checked) == 2 * 2 * 2 and turned > 1.0


@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_before_rotation_in_bf16(family: str) -> None:
    model = tiny_model(family).bfloat16()
    found, hooks = _projections(model)

    def compare(phase: str, call: LayerCall, outcome: Outcome) -> None:
        for which, got in zip("qk", call.pre_rope(), strict=True):
            want = found[call.layer, which].flatten(0, 1)
            assert got.dtype == torch.bfloat16
            # cos, sin, the turn and its inverse each round to 8 bits
            assert (got.float() - want.float()).norm() <= 2**-6 * want.float().norm()

    with attach(model, prefill=Asking()) as session:
        session.on_layer = compare
        model(prompt())
        assert len(session.report().layers) == 2
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("kind", "layout", "stored"),
    [("llama", "half", "halves"), ("glm4", "interleaved", "halves"), ("cohere", "interleaved", "adjacent"),
     ("gpt_oss", "half", "once"), ("gpt_neox", "half", "halves"), ("ernie4_5", "interleaved", "halves")],
)  # fmt: skip
def test_layouts_are_found(kind: str, layout: str, stored: str) -> None:
    config = AutoConfig.for_model(
        kind, vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, eos_token_id=None, pad_token_id=256, bos_token_id=257,
    )  # fmt: skip
    model = from_config(config)
    with attach(model, prefill=Asking()) as session:
        model(prompt())
        assert session.facts.rotations == {0: rotary.Rotation(layout, stored)}


def test_the_first_token_alone_is_enough_to_find_the_layout() -> None:
    """At position 0 nothing turns, so that the pass itself shows no layout."""
    model = model_of("glm4")
    with attach(model, prefill=Asking(), decode=Asking()) as session:
        model(prompt(1))
        assert session.facts.rotations[1] == rotary.Rotation("interleaved", "halves")


def test_asking_leaves_the_answer_alone() -> None:
    model = model_of("llama")
    torch.manual_seed(3)
    with attach(model):
        want = generate(model, prompt(), steps=12, do_sample=True)
    torch.manual_seed(3)
    with attach(model, prefill=Asking(), decode=Asking()):
        got = generate(model, prompt(), steps=12, do_sample=True)
    assert torch.equal(got.logits, want.logits)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_without_rotation_is_refused_by_name() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=264, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)
    model = from_config(config)
    with pytest.raises(Unsupported, match="GPT2LMHeadModel has no rotary embedding"):
        attach(model, prefill=Asking())
    want = model.generate(prompt(), max_new_tokens=8, do_sample=False, eos_token_id=None)
    with attach(model):
        assert torch.equal(model.generate(prompt(), max_new_tokens=8, do_sample=False, eos_token_id=None), want)


def test_a_layer_that_does_not_rotate_is_refused_by_name() -> None:
    """SmolLM3 leaves the rotation out of every fourth layer, though it hands it the angles."""
    config = AutoConfig.for_model(
        "smollm3", vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, no_rope_layers=[1, 0], eos_token_id=None, pad_token_id=256, bos_token_id=257,
    )  # fmt: skip
    model = from_config(config)
    with attach(model, prefill=Asking()), pytest.raises(Unsupported, match=r"layer 1\) does not rotate"):
        model(prompt())
    with attach(model):
        model(prompt())


def test_an_unknown_rotation_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return q * cos.unsqueeze(1) - q.flip(-1) * sin.unsqueeze(1), k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", backwards)
    model = model_of("llama")
    with attach(model, prefill=Asking()), pytest.raises(Unsupported, match="in a layout longreach does not know"):
        model(prompt())


def test_a_method_that_asks_may_be_switched_to() -> None:
    """Layers are noted from then on."""
    model = model_of("llama")
    want = generate(model, prompt(), steps=4)
    with attach(model) as session:
        session.switch(Asking())
        assert torch.equal(generate(model, prompt(), steps=4).tokens, want.tokens)
        assert {layer.method for layer in session.report().layers if layer.phase == "decode"} == {Asking.name}
