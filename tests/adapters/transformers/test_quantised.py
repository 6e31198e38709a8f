"""Quantised linear layers: attention sees what they give, so the answer is the quantised model's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from longreach import attach
from longreach.testing.tiny import random_tokens
from tests.adapters.transformers.reference import generate, model_of
from tests.tiers import swept


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize("family", swept(["phi3", "llama", "gpt_oss"], 1))
def test_dynamic_int8(family: str) -> None:
    """Its projections are no nn.Linear and hold no parameters. (Activations of all rows share one scale, so that
    padding, of which eager attention makes something and longreach nothing, would show: there is none here.)"""
    tokens = random_tokens(2, 40, seed=3)
    model = copy.deepcopy(model_of(family))
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not isinstance(quantised.model.layers[0].self_attn.o_proj, nn.Linear)
    want = generate(quantised, tokens, steps=32)
    with attach(quantised):
        got = generate(quantised, tokens, steps=32)
    assert torch.equal(got.tokens, want.tokens)
    plain = generate(model_of(family), tokens, steps=32)
    assert not torch.equal(plain.logits, want.logits)
