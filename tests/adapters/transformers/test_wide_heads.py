"""Heads of DeepSeek-V3's and Gemma-4's size on a GPU: the kernels answer as the reference does, captured or not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import longreach
from longreach import MAC, Kascade, Quest, StreamingLLM, attach
from longreach.adapters.transformers import shape_of
from longreach.testing.tiny import random_tokens, tiny_model
from tests.adapters.transformers.reference import Generated, generate
from tests.methods.kascade.planned import planned

PLACE = "cuda"
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # 576 channels a token
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mla": ("minicpm3", {"hidden_size": 128, "num_attention_heads": 128, "num_key_value_heads": 128, **LATENT}),
    "mla16": ("minicpm3", {"num_attention_heads": 16, "num_key_value_heads": 16, **LATENT}),
    "gemma4": ("gemma4", {"global_head_dim": 512}),
}
METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "streaming_llm": {"prefill": StreamingLLM(window=100), "decode": StreamingLLM(window=100)},
    "quest": {"decode": Quest(k=0.2, dense_layers=())},
    "mac": {"decode": MAC(min_context=64, window=64, band=32)},
    "snapkv": {"evict": "snapkv capacity=64 window=8"},
}
PROMPT, STEPS = 600, 12

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@cache
def model_of(name: str) -> PreTrainedModel:
    family, sizes = MODELS[name]
    model = tiny_model(family, **sizes).to(PLACE)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(norm := getattr(layer, "q_norm", None), torch.nn.Module):
                norm.weight *= 0.1  # Gemma-4 does not scale logits: random ones reach 130, and snapkv's votes are all 1
    return model


def answers(name: str, tokens: torch.Tensor, **methods: Any) -> None:
    """The kernels' logits are the reference's up to rounding: a key chosen otherwise would change them by far more."""
    model, tokens = model_of(name), tokens.to(PLACE)
    found: dict[str, Generated] = {}
    for impl in ("reference", "triton"):
        with attach(model, impl=impl, loop="plain", **methods):
            found[impl] = generate(model, tokens, steps=STEPS)
    want, got = found["reference"], found["triton"]
    assert torch.equal(got.tokens, want.tokens)
    assert float((got.logits - want.logits).abs().max()) <= 1e-4 * float(want.logits.abs().max())
    with attach(model, **methods) as session:
        captured = longreach.generate(session, tokens, max_new_tokens=STEPS)
        assert any("triton" in row.impl for row in session.report().layers)
    assert torch.equal(captured.sequences[:, tokens.shape[1] :], want.tokens)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_methods(name: str, method: str) -> None:
    answers(name, random_tokens(1, PROMPT, seed=3), **METHODS[method])


@pytest.mark.parametrize("name", MODELS)
def test_kascade(name: str, tmp_path: Path) -> None:
    """Tiles of the prompt, an anchor, and layers that take its keys."""
    shape = shape_of(model_of(name))
    full = tuple(n for n in range(shape.layers) if shape.heads_of(n)[1] == shape.head_dim)
    plan = planned(tmp_path, full[:1], tile=128, layers=full, model=shape)
    chosen = Kascade(plan, k=0.2, min_keys=64)
    answers(name, random_tokens(1, PROMPT, seed=3), prefill=chosen, decode=chosen)


@pytest.mark.parametrize("name", MODELS)
def test_half_precision(name: str) -> None:
    """bf16 logits of a prompt lie as near to fp32's as the reference's bf16 do, to a factor of two."""
    family, sizes = MODELS[name]
    tokens = random_tokens(1, PROMPT, seed=4).to(PLACE)
    half = tiny_model(family, **sizes).to(PLACE, torch.bfloat16)
    truth = tiny_model(family, **sizes).to(PLACE)
    truth.load_state_dict({key: x.float() for key, x in half.state_dict().items()})
    with torch.no_grad(), attach(truth, impl="reference"):
        exact = truth(tokens, use_cache=True).logits
    error = {}
    for impl in ("reference", "triton"):
        with torch.no_grad(), attach(half, impl=impl):
            error[impl] = float((half(tokens, use_cache=True).logits.float() - exact).norm())
    assert error["triton"] <= 2 * error["reference"]
