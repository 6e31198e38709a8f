"""Gradients through an attached model are eager's, or the pass is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from longreach import attach
from longreach.errors import Unsupported
from longreach.testing.tiny import tiny_model
from tests.adapters.transformers.reference import padded_batch, prompt


def _gradients(model: PreTrainedModel, use_cache: bool, mask: Tensor | None, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    labels = tokens.clone()
    if mask is not None:  # the first token of a sequence is predicted from padding, which means nothing
        labels[:, 1:][(mask[:, :-1] * mask[:, 1:]) == 0] = -100
    model(tokens, attention_mask=mask, labels=labels, use_cache=use_cache).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.covering
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "glm4"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
def test_gradients_equal_eagers(family: str, use_cache: bool, padded: bool) -> None:
    model = tiny_model(family)
    tokens, mask = padded_batch((21, 9)) if padded else (prompt(21), None)
    want = _gradients(model, use_cache, mask, tokens)
    truth = _gradients(copy.deepcopy(model), use_cache, mask, tokens)  # the same again: what noise there is
    with attach(model):
        got = _gradients(model, use_cache, mask, tokens)
    assert got.keys() == want.keys() and any("q_proj" in name for name in got)
    for name, gradient in want.items():
        size = gradient.abs().max()
        assert torch.allclose(truth[name], gradient, rtol=0, atol=1e-6 * float(size)), name
        # fp32 sums of some 1000 terms in another order: 1000 half-ulps of the largest
        assert torch.allclose(got[name], gradient, rtol=0, atol=6e-5 * float(size) + 1e-9), name


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
def test_gradients_of_one_projection(trained: str) -> None:
    """Only some of query, key and value carry gradients in the first layer."""
    model = tiny_model("llama")
    for name, p in model.named_parameters():
        p.requires_grad_(trained in name)
    want = _gradients(model, True, None, prompt(21))
    with attach(model):
        got = _gradients(model, True, None, prompt(21))
    assert len(want) == 2
    for name, gradient in want.items():
        assert torch.allclose(got[name], gradient, rtol=0, atol=6e-5 * float(gradient.abs().max())), name


@pytest.mark.parametrize("trained", ["k_proj", "v_proj"])
def test_gradients_into_a_cache_that_holds_tokens_are_refused(trained: str) -> None:
    model = tiny_model("llama")
    for name, p in model.named_parameters():
        p.requires_grad_(f"0.self_attn.{trained}" in name)
    with attach(model):
        with torch.no_grad():
            cache = model(prompt(20)).past_key_values
        with pytest.raises(Unsupported, match="gradients do not flow into a KV cache"):
            model(prompt(1), past_key_values=cache)
        assert cache.columns == 20
        with torch.no_grad():
            model(prompt(1), past_key_values=cache)


def test_gradient_checkpointing_is_refused_by_name() -> None:
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable()
    with attach(model):
        with pytest.raises(Unsupported, match="gradient checkpointing"):
            model(prompt(), labels=prompt())
        model.eval()(prompt(), labels=prompt()).loss.backward()


def test_attention_dropout_is_refused_by_name_while_training() -> None:
    model = tiny_model("llama", attention_dropout=0.1)
    want = model(prompt()).logits
    with attach(model):
        with pytest.raises(Unsupported, match=r"dropout=0\.1"):
            model.train()(prompt())
        got = model.eval()(prompt()).logits
    assert torch.allclose(got, want, rtol=0, atol=1e-4)
