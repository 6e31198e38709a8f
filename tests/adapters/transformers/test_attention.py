"""What reaches attend: windows, soft caps, sinks; keywords that longreach does not know are refused by name."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import longreach
from longreach import StreamingLLM, attach
from longreach.errors import CalledOutside, Unsupported
from longreach.methods.call import LayerCall
from longreach.ops import HeadShard, Spans
from longreach.testing.tiny import WINDOW, tiny_model
from tests.adapters.transformers.reference import generate, model_of, prompt


def _calls(family: str, **attached: Any) -> list[tuple[str, LayerCall]]:
    seen: list[tuple[str, LayerCall]] = []
    with attach(model_of(family), **attached) as session:
        session.on_layer = lambda phase, call, outcome: seen.append((phase, call))
        generate(model_of(family), prompt(), steps=3)
    return seen


def test_softcap_scale_and_shard_arrive() -> None:
    for _, call in _calls("gemma2"):
        assert call.softcap == model_of("gemma2").config.attn_logit_softcapping == 5.0
        assert call.scale == pytest.approx(4**-0.5)
        assert (call.shard.first, call.shard.count, call.shard.total) == (0, 2, 2)
        assert isinstance(call.shard, HeadShard) and call.sink_logit is None
    assert {call.softcap for _, call in _calls("llama")} == {None}


def test_phases_arrive() -> None:
    phases = [(phase, call.phase) for phase, call in _calls("llama")]
    assert phases == [("prefill", "prefill")] * 2 + [("decode", "decode")] * 4


def test_tokens_to_come_arrive() -> None:
    """As far as the prompt's end is known; generate of transformers does not say it."""
    model, seen = model_of("llama"), []
    with attach(model) as session:
        session.on_layer = lambda phase, call, outcome: seen.append((phase, call.prompt_tokens_left))
        longreach.generate(session, prompt(length=20), max_new_tokens=3, prefill_chunk_size=8)
    layers = model.config.num_hidden_layers
    assert seen[::layers] == [("prefill", 12), ("prefill", 4), ("prefill", 0), ("decode", 0), ("decode", 0)]
    assert {call.prompt_tokens_left for _, call in _calls("llama")} == {0}


def test_sinks_arrive() -> None:
    layers = model_of("gpt_oss").model.layers
    calls = _calls("gpt_oss")
    assert len(calls) == 6
    for _, call in calls:
        assert torch.equal(call.sink_logit, layers[call.layer].self_attn.sinks)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_are_used(family: str) -> None:
    """The same pass with the cap or the sinks dropped gives other results."""
    for _, call in _calls(family):
        plain = LayerCall(call.layer, call.rows, call.kv, call.slots, call.scale)
        got, without = call.attend(Spans.dense()), plain.attend(Spans.dense())
        assert (got.out - without.out).abs().max() > 0.05


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gpt_oss"])
def test_sliding_layers_stay_dense_within_their_window_and_say_so(family: str) -> None:
    """Whatever the method: 40 prompt tokens and 7 steps, each row reading min(position + 1, window) keys."""
    model = model_of(family)
    types = getattr(model.config, "layer_types", None) or ["sliding_attention"] * 2
    with attach(model, prefill=StreamingLLM(1, 2), decode=StreamingLLM(1, 2)) as session:
        generate(model, prompt(), steps=8)
    vector = 2 * 16 * 4  # heads, channels, bytes
    for row in session.report().layers:
        positions = range(40) if row.phase == "prefill" else range(40, 47)
        if types[row.layer] == "sliding_attention":
            keys = sum(min(p + 1, WINDOW) for p in positions)
            assert row.key_bytes == row.value_bytes == keys * vector and row.fraction == 1.0
            assert (row.method, row.dense_reasons) == ("dense", ("sliding window of 16",))
        else:
            keys = sum(min(p + 1, 3) for p in positions)
            assert row.key_bytes == keys * vector
            assert row.dense_bytes == 2 * sum(p + 1 for p in positions) * vector
            assert (row.method, row.dense_reasons) == ("streaming_llm", ())


@torch.no_grad()
def test_sliding_layers_read_nothing_outside_their_window() -> None:
    model = model_of("mistral")
    with attach(model) as session:
        cache = session.new_cache()
        model(prompt(), past_key_values=cache)
        want = model(prompt(1), past_key_values=cache).logits
        cache.crop(-1)
        for pair in cache.kv.memory:
            for x in pair:
                x[:, :, : 41 - WINDOW] = torch.nan  # a step at position 40 sees 25 to 40
        assert torch.equal(model(prompt(1), past_key_values=cache).logits, want)
        cache.crop(-1)
        cache.kv.memory[0][0][:, :, 41 - WINDOW] = torch.nan
        assert not torch.equal(model(prompt(1), past_key_values=cache).logits, want)


@pytest.mark.parametrize("value", [1, 2.5, torch.ones(3)], ids=["int", "float", "tensor"])
def test_unknown_keywords_are_refused_by_name(value: Any) -> None:
    model = model_of("llama")
    with attach(model), pytest.raises(Unsupported, match=r"position_bias=.*does not implement"):
        model(prompt(), position_bias=value)
    assert torch.isfinite(model(prompt()).logits).all()


def test_keywords_that_change_nothing_pass() -> None:
    model = copy.deepcopy(model_of("llama"))  # transformers leaves hooks on a model that gave hidden states
    want = model(prompt()).logits
    with attach(model):
        out = model(prompt(), output_hidden_states=True, logits_to_keep=5, num_items_in_batch=3, position_bias=None)
    assert torch.allclose(out.logits, want[:, -5:], rtol=0, atol=1e-4) and len(out.hidden_states) == 3


def test_attention_weights_are_refused() -> None:
    model = model_of("llama")
    with attach(model):
        with pytest.raises(Unsupported, match="output_attentions"):
            model(prompt(), output_attentions=True)
        with pytest.raises(Unsupported, match="output_attentions"):
            model.generate(prompt(), max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


def _patched(monkeypatch: pytest.MonkeyPatch, module: ModuleType, change: Any) -> None:
    """Let `change` edit (query, key, value, mask, keywords) on their way from the model's layers to attention."""
    original = module.ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(name: str, default: Any) -> Any:
        function = original(name, default)

        def call(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
            q, k, v, mask, kwargs = change(layer, q, k, v, mask, kwargs)
            return function(layer, q, k, v, mask, **kwargs)

        return call

    monkeypatch.setattr(module.ALL_ATTENTION_FUNCTIONS, "get_interface", get_interface)


STRANGE: dict[str, Any] = {
    r"is_causal=False": lambda a, q, k, v, m, kw: (q, k, v, m, {**kw, "is_causal": False}),
    r"no mask at all": lambda a, q, k, v, m, kw: (q, k, v, None, kw),
    r"a mask of its own": lambda a, q, k, v, m, kw: (q, k, v, torch.zeros(1, 1, 40, 40), kw),
    r"attends to other keys": lambda a, q, k, v, m, kw: (q, k + 1, v, m, kw),
    r"attends to other keys ": lambda a, q, k, v, m, kw: (q, k, v * 2, m, kw),
    r"to 41 keys in a pass of 40 tokens": lambda a, q, k, v, m, kw: (q, torch.cat([k, k[:, :, :1]], 2), v, m, kw),
    r"values of 8 channels": lambda a, q, k, v, m, kw: (q, k, v[..., :8], m, kw),
    r"torch.float32, torch.float32 and torch.bfloat16": lambda a, q, k, v, m, kw: (q, k, v.bfloat16(), m, kw),
    r"sliding_window of 8 tokens, but its mask is causal": lambda a, q, k, v, m, kw: (
        q, k, v, m, {**kw, "sliding_window": 8}),
}  # fmt: skip


@pytest.mark.parametrize("message", STRANGE)
@torch.no_grad()
def test_strange_attention_calls_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    model = model_of("llama")
    _patched(monkeypatch, modeling_llama, STRANGE[message])
    with attach(model), pytest.raises(Unsupported, match=message.strip()):
        model(prompt())


@torch.no_grad()
def test_a_window_shorter_than_its_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _patched(monkeypatch, modeling_gpt_oss, lambda a, q, k, v, m, kw: (q, k, v, m, {**kw, "sliding_window": 8}))
    with (
        attach(model_of("gpt_oss")),
        pytest.raises(Unsupported, match="8 tokens, but its mask is a sliding window of 16"),
    ):
        model_of("gpt_oss")(prompt())


@torch.no_grad()
def test_layers_that_attend_twice_or_not_at_all_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    with attach(model), pytest.raises(Unsupported, match="attends twice in layer 0"):
        model(prompt())
    model = tiny_model("llama")
    model.model.layers = model.model.layers[:1]
    with attach(model), pytest.raises(Unsupported, match=r"layers \[0\] of 2"):
        model(prompt())


def test_attention_outside_an_attached_forward_is_refused() -> None:
    model, shares = tiny_model("llama"), tiny_model("llama", seed=1)
    shares.model.config = shares.config = model.config
    for layer in shares.model.layers:
        layer.self_attn.config = model.config
    with attach(model):
        layer = model.model.layers[0]
        angles = model.model.rotary_emb(torch.zeros(1, 4, 64), torch.arange(4)[None])
        with pytest.raises(CalledOutside, match="one of its parts was called alone"):
            layer(torch.zeros(1, 4, 64), position_embeddings=angles)
        with pytest.raises(CalledOutside, match="another one shares its config"):
            shares(prompt())
    shares(prompt())
