"""What a model means by its mask is found exactly, or refused; nothing of size [T, N] is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, masking_utils

from longreach import attach
from longreach.adapters.transformers.mask import Pattern, pattern
from longreach.adapters.transformers.mask import mask as made
from longreach.errors import Unsupported
from longreach.testing.tiny import from_config
from tests.adapters.transformers.reference import prompt

CAUSAL, SLIDING = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function


class Config:
    sliding_window = 8


def _ask(function: Callable[..., Any], length: int = 100, past: int = 0, batch: int = 2, **kwargs: Any) -> Pattern:
    return pattern(batch, length, past + length, past, 0, function, **kwargs)


@pytest.mark.parametrize("length", [1, 2, 7, 100])
@pytest.mark.parametrize("past", [0, 1, 60])
def test_causal_and_sliding_are_told_apart(length: int, past: int) -> None:
    assert _ask(CAUSAL, length, past) == Pattern()
    assert _ask(CAUSAL, length, past, config=Config()) == Pattern()
    assert _ask(SLIDING(8), length, past, config=Config(), local_size=8) == Pattern(8)
    assert _ask(SLIDING(5), length, past, config=Config(), local_size=5) == Pattern(5)


def test_a_window_composed_by_the_model_itself_is_found() -> None:
    both = masking_utils.and_masks(CAUSAL, masking_utils.sliding_window_overlay(8))
    assert _ask(both, config=Config()) == Pattern(8)
    with pytest.raises(Unsupported, match="neither causal nor a sliding window"):
        _ask(both)


def _block(first: int, stop: int, batch: int = 2) -> torch.Tensor:
    ids = torch.full((batch, 100), -1)
    ids[-1, first:stop] = 0
    return ids


def _packed(boundary: int) -> torch.Tensor:
    return (torch.arange(100) >= boundary).long().expand(2, -1)


STRANGE = {
    "bidirectional": masking_utils.bidirectional_mask_function,
    "chunked": masking_utils.chunked_causal_mask_function(16, torch.zeros(2, dtype=torch.long)),
    "one more": lambda b, h, q, k: k <= q + 1,
    "all but itself": lambda b, h, q, k: k < q,
    "prefix": lambda b, h, q, k: (k <= q) | (k < 3),
    "window off by one": SLIDING(9),
    "first key hidden": lambda b, h, q, k: (k <= q) & (k > 0),
    **{
        f"packed at {n}": masking_utils.and_masks(CAUSAL, masking_utils.packed_sequence_mask_function(_packed(n)))
        for n in (1, 2, 50, 98, 99)
    },
    **{
        f"block {a}-{b} of the last": masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(_block(a, b)))
        for a, b in ((0, 2), (33, 35), (97, 100))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_other_patterns_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="neither causal nor a sliding window"):
        _ask(STRANGE[name], config=Config())


def test_a_step_is_asked_too() -> None:
    """A model may mask its prompt causally and its steps otherwise."""
    with pytest.raises(Unsupported, match="neither causal"):
        _ask(STRANGE["chunked"], 1, 90)
    with pytest.raises(Unsupported, match="neither causal"):
        _ask(SLIDING(9), 1, 50, config=Config(), local_size=8)


def test_a_mask_function_that_cannot_be_asked_is_refused() -> None:
    def scalar_only(b: Any, h: Any, q: Any, k: Any) -> bool:
        return bool(k <= q)

    with pytest.raises(Unsupported, match="mask function failed"):
        _ask(scalar_only)
    with pytest.raises(Unsupported, match="without a mask function"):
        pattern(1, 4, 4)


def test_a_model_that_handles_its_mask_as_a_tensor_is_refused() -> None:
    mask = made(1, 4, 4, mask_function=CAUSAL)
    for use in (lambda: mask.shape, lambda: mask[:, :, :4], lambda: mask.to(torch.float32)):
        with pytest.raises(Unsupported, match="attention mask"):
            use()
    assert not hasattr(mask, "dim") and mask.pattern == Pattern()
    assert str(Pattern()) == "causal" and str(Pattern(3)) == "a sliding window of 3"


def test_a_mask_that_no_layer_uses_is_not_asked() -> None:
    mask = made(1, 4, 4)
    with pytest.raises(Unsupported, match="without a mask function"):
        _ = mask.pattern


def test_no_mask_of_the_size_of_the_scores_is_built() -> None:
    """A prompt of 200 000 tokens: the scores would be 40 G entries."""
    assert _ask(SLIDING(4096), 200_000, batch=1, local_size=4096) == Pattern(4096)


def test_bidirectional_models_are_refused() -> None:
    config = AutoConfig.for_model(
        "bert", vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    model = from_config(config)
    with attach(model), pytest.raises(Unsupported, match="neither causal nor a sliding window"):
        model(prompt())


def test_a_decoder_switched_to_bidirectional_is_refused() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    config.is_causal = False
    model = from_config(config)
    with attach(model), pytest.raises(Unsupported, match="is_causal=False"):
        model(prompt())
