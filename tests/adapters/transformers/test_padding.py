"""Plain forward passes: padding on either side, masks of any dtype, what contradicts itself is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longreach import attach
from longreach.errors import InvalidInput, Unsupported
from tests.adapters.transformers.reference import exact, model_of, padded_batch, prompt

ROUNDING = 1e-4  # of logits of size 5; eager's own fp32 error against fp64 is up to 2e-5 here


def _close(got: Tensor, want: Tensor, mask: Tensor) -> bool:
    return torch.allclose(got[mask.bool()], want[mask.bool()], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("right", [True, False])
@torch.no_grad()
def test_padding_on_either_side(family: str, use_cache: bool, right: bool) -> None:
    model, (tokens, mask) = model_of(family), padded_batch(right=right)
    want = model(tokens, attention_mask=mask).logits
    with attach(model):
        out = model(tokens, attention_mask=mask, use_cache=use_cache)
    assert _close(out.logits, want, mask)
    assert (out.past_key_values is None) == (not use_cache)
    if use_cache:
        assert out.past_key_values.kv.lengths == mask.sum(1).tolist()


@torch.no_grad()
def test_decoding_after_padding_on_the_right() -> None:
    """Columns of padding lie between a sequence's tokens; in windows too, each sequence is what it is alone."""
    model, (tokens, mask) = model_of("mistral"), padded_batch((30, 22), right=True)
    with attach(model):
        out = model(tokens, attention_mask=mask)
        for _ in range(4):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            new, positions = out.logits.new_full((2, 1), 65).long(), mask.sum(1, keepdim=True) - 1
            tokens = torch.cat([tokens, new], 1)
            out = model(new, attention_mask=mask, position_ids=positions, past_key_values=out.past_key_values)
    for row in range(2):
        alone = exact("mistral")(tokens[row][mask[row].bool()][None]).logits[0, -1]
        assert torch.allclose(out.logits[row, -1].double(), alone, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.uint8])
@torch.no_grad()
def test_masks_of_any_dtype(dtype: torch.dtype) -> None:
    model, (tokens, mask) = model_of("llama"), padded_batch()
    want = model(tokens, attention_mask=mask).logits
    with attach(model):
        assert _close(model(tokens, attention_mask=mask.to(dtype)).logits, want, mask)


@torch.no_grad()
def test_a_sequence_that_is_all_padding() -> None:
    model, (tokens, mask) = model_of("llama"), padded_batch()
    mask[1] = 0
    want = model(tokens[[0, 2]], attention_mask=mask[[0, 2]]).logits
    with attach(model):
        got = model(tokens, attention_mask=mask).logits
    assert _close(got[[0, 2]], want, mask[[0, 2]]) and bool(got.isfinite().all())


@torch.no_grad()
def test_positions_may_start_anywhere() -> None:
    model = model_of("llama")
    positions = torch.arange(100, 140)[None]
    want = model(prompt(), position_ids=positions).logits
    with attach(model):
        assert torch.allclose(model(prompt(), position_ids=positions).logits, want, rtol=0, atol=ROUNDING)


@torch.no_grad()
def test_a_single_real_token_is_looked_at_outside_generate() -> None:
    """A step in which one sequence goes on and the other pauses."""
    model, tokens = model_of("llama"), prompt(20).repeat(2, 1)
    with attach(model):
        cache = model(tokens).past_key_values
        mask = torch.ones(2, 21, dtype=torch.long)
        mask[1, 20] = 0
        model(torch.tensor([[65], [256]]), attention_mask=mask, past_key_values=cache)
        assert cache.kv.lengths == [21, 20]
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        positions = mask.sum(1, keepdim=True) - 1
        out = model(torch.tensor([[66], [66]]), attention_mask=mask, position_ids=positions, past_key_values=cache)
    long = torch.cat([tokens[:1], torch.tensor([[65, 66]])], 1)
    short = torch.cat([tokens[:1], torch.tensor([[66]])], 1)
    for row, alone in enumerate((long, short)):
        assert torch.allclose(out.logits[row, -1], model(alone).logits[0, -1], rtol=0, atol=ROUNDING)


@torch.no_grad()
def test_what_contradicts_itself_is_refused() -> None:
    model, (tokens, mask) = model_of("llama"), padded_batch()
    packed = torch.cat([torch.arange(25), torch.arange(15)])[None]
    with attach(model) as session:
        with pytest.raises(Unsupported, match="packed sequences"):
            model(prompt(), position_ids=packed)
        with pytest.raises(Unsupported, match=r"packed sequences|neither causal"):
            model(prompt(), position_ids=packed, use_cache=False)
        with pytest.raises(Unsupported, match=r"position_ids.*3, 1, 40"):
            model.model(input_ids=prompt(), position_ids=torch.arange(40).expand(3, 1, 40))
        with pytest.raises(Unsupported, match=r"2-D.*\[1, 1, 40, 40\]"):
            model(prompt(), attention_mask=torch.zeros(1, 1, 40, 40))
        with pytest.raises(Unsupported, match=r"2-D.*dict"):
            model(prompt(), attention_mask={"full_attention": None})
        with pytest.raises(Unsupported, match="0 and 1 only"):
            model(prompt(), attention_mask=torch.full((1, 40), 2))
        with pytest.raises(InvalidInput, match=r"expected \[1, 40\], got \[1, 39\]"):
            model(prompt(), attention_mask=torch.ones(1, 39))
        with pytest.raises(InvalidInput, match="at least one token"):
            model(prompt()[:, :0])
        cache = model(tokens, attention_mask=mask, past_key_values=session.new_cache(3)).past_key_values
        with pytest.raises(InvalidInput, match="filled with padding"):
            model(tokens, past_key_values=cache)
        with pytest.raises(InvalidInput, match="other past columns"):
            model(tokens, attention_mask=torch.ones(3, 80), past_key_values=cache)
        with pytest.raises(InvalidInput, match="holds 3 sequences, the input has 1"):
            model(prompt(), past_key_values=cache)
        assert cache.columns == 40
