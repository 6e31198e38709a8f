"""Documents packed into one row: memories begin anew where positions restart at 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from longreach.errors import InvalidInput
from longreach.testing.tiny import random_tokens
from tests.adapters.transformers.mka.models import HASH, RECALL, THREE, TWO, close, converted

LENGTHS = ((17, 1, 22), (30, 10))  # of the documents in each row
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [TWO, THREE, HASH, RECALL], ids=["two", "three", "hash", "recall"])
@torch.no_grad()
def test_packed_documents_equal_separate_ones(options: dict[str, Any], how: str) -> None:
    model, tokens = converted(**options), random_tokens(2, 40)
    model.set_attn_implementation(how)
    got = model(tokens, position_ids=POSITIONS, use_cache=False).logits
    for row, (lengths, text) in enumerate(zip(LENGTHS, tokens, strict=True)):
        documents = text.split(list(lengths))
        want = torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])
        close(got[row], want)


@torch.no_grad()
def test_one_row_of_positions_counts_for_all() -> None:
    model, tokens = converted(), random_tokens(2, 40)
    got = model(tokens, position_ids=POSITIONS[:1], use_cache=False).logits
    close(got, model(tokens, position_ids=POSITIONS[:1].expand(2, -1), use_cache=False).logits)
    assert not torch.allclose(got, model(tokens).logits, atol=0.1)


@torch.no_grad()
def test_positions_may_begin_anywhere() -> None:
    """What counts is where a document's own tokens begin."""
    model, tokens = converted(**THREE), random_tokens(2, 20)
    got = model(tokens, position_ids=torch.arange(5, 25)[None], use_cache=False).logits
    close(got, model(tokens, use_cache=False).logits)


@torch.no_grad()
def test_a_cache_of_packed_documents_cannot_be_continued() -> None:
    model, tokens = converted(), random_tokens(2, 40)
    cache = DynamicCache(config=model.config)
    model(tokens, position_ids=POSITIONS, past_key_values=cache)
    with pytest.raises(InvalidInput, match="layer 0 cannot be continued, as documents were packed into it"):
        model(tokens[:, :1], past_key_values=cache)
