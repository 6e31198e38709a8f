"""Block-MKA in a session whose steps the kernels for few rows compute: tokens, and what the report says was read."""

from __future__ import annotations

import pytest

from longreach import CacheConfig, attach
from longreach.testing.tiny import random_tokens
from tests.adapters.transformers.mka.models import close
from tests.adapters.transformers.mka.test_attached_levels import CACHES
from tests.adapters.transformers.mka.test_levels import VARIANTS, made
from tests.adapters.transformers.reference import generate, padded_batch

BLOCK = [name for name, (variant, _) in VARIANTS.items() if variant == "block_mka"]
STEPS = 6  # in which blocks of 4 are completed


@pytest.mark.parametrize("name", BLOCK)
@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
@pytest.mark.covering
def test_plain_tokens(name: str, config: CacheConfig) -> None:
    model = made(name)
    tokens, mask = padded_batch((22, 5))
    want = generate(model, tokens, mask, steps=STEPS)
    with attach(model, cache=config, impl="triton") as session:
        got = generate(model, tokens, mask, steps=STEPS)
        kernels = {layer.impl for layer in session.report().layers if layer.phase == "decode"}
    close(got.logits, want.logits, 1e-4)
    assert got.tokens.tolist() == want.tokens.tolist() and kernels == {"triton"}


@pytest.mark.parametrize("name", BLOCK)
def test_mean_keys_that_choose_are_counted_once(name: str) -> None:
    """Keys and values as when levels are attended to one by one; codes where they are other numbers than mean keys."""
    tokens, found = random_tokens(1, 60), {}
    for impl in ("reference", "triton"):
        model = made(name)
        with attach(model, impl=impl) as session:
            generate(model, tokens, steps=2)
            found[impl] = [r for r in session.report().layers if r.phase == "decode"]
    for plain, few in zip(found["reference"], found["triton"], strict=True):
        assert (few.key_bytes, few.value_bytes) == (plain.key_bytes, plain.value_bytes)
        codes = 13 * 2 * 16 * 4 if name == "block" else 0  # of blocks before the window, both KV heads, fp32
        assert few.metadata_bytes == plain.metadata_bytes - codes
