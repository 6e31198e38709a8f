"""What attention adds to the residual stream, in every family: it is what the rest of the layer goes on with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from longreach.adapters.transformers import attach, residuals
from longreach.adapters.transformers.checks import decoder_of
from longreach.errors import Unsupported
from longreach.testing.tiny import FAMILIES, VOCABULARY, from_config, tiny_model

IDS = torch.arange(14).reshape(2, 7) * 3 % 200
NEXT = {"gemma2": "pre_feedforward_layernorm"}  # the norm that the stream goes through next; else:
OTHERS = "post_attention_layernorm"


def seen(model: Any, ids: Tensor = IDS) -> dict[int, tuple[Tensor, Tensor]]:
    found: dict[int, tuple[Tensor, Tensor]] = {}
    with residuals(model, lambda layer, x, out: found.__setitem__(layer, (x, out))), torch.no_grad():
        model(ids)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stream_goes_on_with_the_sum(family: str) -> None:
    model = tiny_model(family)
    streams: list[Tensor] = []
    handles = [
        getattr(layer, NEXT.get(family, OTHERS)).register_forward_pre_hook(lambda m, args: streams.append(args[0]))
        for layer in decoder_of(model).layers
    ]
    with attach(model):
        found = seen(model)
    for handle in handles:
        handle.remove()
    assert list(found) == [0, 1] and len(streams) == 2
    for (x, out), stream in zip(found.values(), streams, strict=True):
        assert x.shape == out.shape == stream.shape and float(out.abs().mean()) > 0
        torch.testing.assert_close(x + out, stream)
    with torch.no_grad():
        torch.testing.assert_close(found[0][0], decoder_of(model)(IDS, output_hidden_states=True).hidden_states[0])


def test_a_factor_on_what_is_added_counts() -> None:
    from transformers import AutoConfig

    from longreach.testing.tiny import from_config

    shape = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}  # fmt: skip
    model = from_config(AutoConfig.for_model("granite", residual_multiplier=0.25, **shape))
    streams: list[Tensor] = []
    hook = (
        decoder_of(model)
        .layers[0]
        .post_attention_layernorm.register_forward_pre_hook(lambda m, args: streams.append(args[0]))
    )
    x, out = seen(model)[0]
    hook.remove()
    torch.testing.assert_close(x + out, streams[0])


def test_no_hook_stays() -> None:
    model = tiny_model("llama")
    seen(model)
    with pytest.raises(ZeroDivisionError), residuals(model, lambda layer, x, out: 1 / 0):  # type: ignore[arg-type]
        model(IDS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_without_layers_is_refused() -> None:
    model = tiny_model("llama")
    decoder = decoder_of(model)
    decoder.layers = nn.ModuleList([layer.self_attn for layer in decoder.layers])
    with pytest.raises(Unsupported, match="stands in no layer of its own"), residuals(model, lambda *_: None):
        raise AssertionError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_module_that_wraps_norms_around_attention_is_not_attention() -> None:
    """DBRX: attention and its norms stand in a module whose name holds "Attention" too."""
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}
    experts = {"ffn_hidden_size": 96, "moe_num_experts": 2, "moe_top_k": 1}
    model = from_config(AutoConfig.for_model(
        "dbrx", d_model=64, n_heads=4, n_layers=2, max_seq_len=512, vocab_size=VOCABULARY, attn_config=attention,
        ffn_config=experts,
    ))  # fmt: skip
    after = dict[int, Tensor]()
    for layer, block in enumerate(model.get_decoder().blocks):
        block.norm_attn_norm.register_forward_hook(lambda m, a, out, layer=layer: after.__setitem__(layer, out[0]))
    found = seen(model)
    assert sorted(found) == sorted(after) == [0, 1]
    assert all(torch.allclose(x + out, after[layer], atol=1e-6) for layer, (x, out) in found.items())
