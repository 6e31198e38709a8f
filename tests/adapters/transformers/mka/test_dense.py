"""A converted model that computes its original's attention for a while."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.adapters.transformers import attach
from longreach.adapters.transformers.mka.dense import dense
from longreach.errors import ConcurrentUse
from longreach.testing.tiny import random_tokens
from tests.adapters.transformers.mka.models import THREE, converted, original


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(random_tokens(1, 30), use_cache=False).logits


@pytest.mark.parametrize(("family", "variant"), [("llama", "fastmka"), ("phi3", "mka"), ("llama", "block_mka")])
def test_dense_is_the_original_and_leaves_no_trace(family: str, variant: str) -> None:
    model = converted(family, variant, **THREE)
    before, expected = logits(model), logits(original(family))
    with dense(model):
        assert torch.equal(logits(model), expected)
        with attach(model) as session:
            torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-4)
            with pytest.raises(ConcurrentUse, match="close the session first"), dense(model):
                pass
        assert session.report().fraction("prefill") == 1.0
    assert torch.equal(logits(model), before) and not torch.equal(before, expected)
    with pytest.raises(ZeroDivisionError), dense(model):
        raise ZeroDivisionError
    assert torch.equal(logits(model), before)


def test_a_model_that_was_not_converted_stays_as_it_is() -> None:
    model = original("llama")
    before = logits(model)
    with dense(model):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), before) and not model.get_decoder()._forward_pre_hooks


def test_present_weights_are_used() -> None:
    model = converted("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    with dense(model):
        assert not torch.equal(logits(model), logits(original("llama")))
