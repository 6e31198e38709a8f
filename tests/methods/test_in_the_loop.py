"""Methods with state, or choices for later layers, in longreach's own decode loop: caches grow between answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longreach
from longreach.cache import CacheConfig
from longreach.methods.base import AttentionMethod
from longreach.methods.less_is_more import LessIsMore
from longreach.methods.loki import Loki
from longreach.methods.magicpig import MagicPIG
from longreach.methods.omnikv import OmniKV
from longreach.methods.quest import Quest
from longreach.testing.tiny import random_tokens
from tests.methods.planned import tiny

METHODS = [
    Quest(k=0.3, page=4, dense_layers=(0,)),
    OmniKV(k=9, layers=(0,)),
    LessIsMore(k=0.2, layers=(1,)),
    Loki(k=0.2, rank=6),
    MagicPIG(bits=7, tables=6, local=8, seal=8, centre=16, dense_layers=(0,)),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.mark.covering
@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=16)], ids=["contiguous", "paged"])
def test_answers_are_those_of_generate(model: Any, method: AttentionMethod, config: CacheConfig) -> None:
    """Short, long and short again: memory grows in between, and what is kept beside it with it."""
    with longreach.attach(model, decode=method, cache=config) as session:
        for length, seed in ((20, 0), (130, 1), (33, 2)):
            tokens = random_tokens(2, length, seed=seed)
            mask = torch.ones_like(tokens)
            mask[1, :7] = 0
            want = model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
            for chunk in (None, 17) if length == 130 else (None,):
                made = longreach.generate(session, tokens, mask, max_new_tokens=8, prefill_chunk_size=chunk)
                assert torch.equal(made.sequences, want)
        report = session.report()
        assert {layer.method for layer in report.layers if layer.phase == "decode"} == {method.name}
        share = report.fraction("decode")
        assert share is not None and share < 1
