"""Every supported family gives transformers' own answers: one sequence, a left-padded batch, a prompt in chunks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from longreach import CacheConfig, attach
from longreach.testing.tiny import FAMILIES, from_config
from tests.adapters.transformers.reference import (
    STEPS,
    assert_same_answer,
    eager_batch,
    eager_one,
    expect,
    generate,
    model_of,
    padded_batch,
    prompt,
)
from tests.tiers import families

PAGED = ("llama", "gemma2", "gpt_oss", "glm4")
CACHES = [
    *(pytest.param(family, CacheConfig(), id=f"{family}-contiguous") for family in FAMILIES),
    *(pytest.param(family, CacheConfig("paged", page=8), id=f"{family}-paged") for family in PAGED),
]
FEWER = [
    c if c.id in ("gemma2-contiguous", "glm4-contiguous", "gpt_oss-paged", "llama-paged")
    else pytest.param(*c.values, id=c.id, marks=pytest.mark.sweep)
    for c in CACHES
]  # fmt: skip


@pytest.mark.parametrize(("family", "cache"), CACHES)
def test_one_sequence(family: str, cache: CacheConfig) -> None:
    with attach(model_of(family), cache=cache):
        got = generate(model_of(family), prompt())
    assert got.tokens.shape == (1, STEPS)
    assert_same_answer(got, eager_one(family))


@pytest.mark.parametrize(("family", "cache"), FEWER)
def test_left_padded_batch(family: str, cache: CacheConfig) -> None:
    tokens, mask = padded_batch()
    with attach(model_of(family), cache=cache):
        got = generate(model_of(family), tokens, mask)
    assert_same_answer(got, eager_batch(family))


@pytest.mark.parametrize(("family", "cache"), FEWER)
def test_prompt_in_chunks_that_do_not_divide_it(family: str, cache: CacheConfig) -> None:
    with attach(model_of(family), cache=cache) as session:
        got = generate(model_of(family), prompt(), prefill_chunk_size=7)
        assert {r.steps for r in session.report().layers if r.phase == "prefill"} == {6}
    assert_same_answer(got, eager_one(family))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padded_batch_in_chunks(family: str) -> None:
    """The first chunks of the shortest sequence are padding only, and the last chunk is a single token."""
    tokens, mask = padded_batch()
    with attach(model_of(family)) as session:
        got = generate(model_of(family), tokens, mask, prefill_chunk_size=13)
        assert {r.steps for r in session.report().layers if r.phase == "decode"} == {STEPS - 1}
    assert_same_answer(got, eager_batch(family))


@pytest.mark.parametrize(
    "cache",
    [CacheConfig(), CacheConfig("paged", page=16), CacheConfig(capacity=400)],
    ids=["contiguous", "paged", "fixed"],
)
def test_answer_longer_than_the_first_capacity(cache: CacheConfig) -> None:
    """The cache starts with room for 256 tokens and grows twice between steps."""
    tokens, mask = padded_batch((250, 30))
    model = model_of("llama")
    want = expect("llama", tokens, mask, steps=20)
    with attach(model, cache=cache) as session:
        kv = session.new_cache(2)
        got = generate(model, tokens, mask, steps=20, past_key_values=kv)
        assert kv.kv.lengths == [250 + 19, 30 + 19]
    assert_same_answer(got, want)


@pytest.mark.parametrize("kind", ["qwen2_moe", "phimoe"])
def test_window_that_only_the_mask_knows(kind: str) -> None:
    """These models pass no sliding_window to attention; transformers applies it by the mask alone."""
    config = AutoConfig.for_model(
        kind, vocab_size=264, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        shared_expert_intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        num_local_experts=4, num_experts_per_tok=2, sliding_window=16, use_sliding_window=True, max_window_layers=1,
        initializer_range=0.2, eos_token_id=None, pad_token_id=256, bos_token_id=257,
    )  # fmt: skip
    model = from_config(config)
    want = generate(model, prompt(), steps=24)
    with attach(model) as session:
        got = generate(model, prompt(), steps=24)
        assert any(r.dense_reasons == ("sliding window of 16",) for r in session.report().layers)
    assert torch.equal(got.tokens, want.tokens)
    model.config.sliding_window = 1000  # eager itself, for proof that the window shows
    wide = generate(model, prompt(), steps=24)
    assert not torch.equal(wide.tokens, want.tokens)


class _Routes:
    """Experts chosen by the first pass of a model, kept in those that follow.

    Which experts a token goes to is a choice: where two come close, any rounding turns it, and an error of any
    size follows. What is compared here is the rounding of attention, so all passes take the same experts.
    """

    def __init__(self) -> None:
        self.chosen: dict[str, Tensor] = {}

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[None]:
        routers = [(name, m) for name, m in model.named_modules() if name.endswith("mlp.router")]
        hooks = [m.register_forward_hook(partial(self._route, name)) for name, m in routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _route(self, name: str, module: nn.Module, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> Any:
        """GPT-OSS: logits of all experts, weights of the chosen ones (a softmax over those), the chosen ones."""
        logits, weights, chosen = out
        assert torch.equal(weights, logits.gather(1, chosen).softmax(1))
        chosen = self.chosen.setdefault(name, chosen)
        return logits, logits.gather(1, chosen).softmax(1), chosen


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "glm4"])
@torch.no_grad()
def test_low_precision(family: str, dtype: torch.dtype) -> None:
    """As near to fp64 with the same weights as eager attention in the same dtype: twice its error, and one rounding."""
    model = copy.deepcopy(model_of(family)).to(dtype)
    model.set_experts_implementation("eager")
    exact, routes = copy.deepcopy(model).double(), _Routes()
    with routes.kept(exact):
        truth = exact(prompt()).logits
    with routes.kept(model):
        theirs = (model(prompt()).logits - truth).norm()
        with attach(model):
            error = (model(prompt()).logits - truth).norm()
    assert len(routes.chosen) == (2 if family == "gpt_oss" else 0)
    assert error <= 2 * theirs + torch.finfo(dtype).eps * truth.norm()


def _without_queries(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Queries of zero (4 heads of 16 channels, the first of Phi-3's joint projection) weigh all keys alike."""
    return torch.cat([torch.zeros_like(out[..., :64]), out[..., 64:]], -1)


@pytest.mark.parametrize("family", families(4))
def test_the_tests_can_see_attention(family: str) -> None:
    """Guard of all the others: with a plain mean in place of attention hardly a greedy token stays."""
    model = model_of(family)
    projections = [m for name, m in model.named_modules() if name.endswith(("q_proj", "qkv_proj"))]
    hooks = [m.register_forward_hook(_without_queries) for m in projections]
    try:
        mean = generate(model, prompt())
    finally:
        for hook in hooks:
            hook.remove()
    assert len(hooks) == 2
    same = (mean.tokens == eager_one(family).answer.tokens).float().mean()
    assert same <= 0.2, f"{same:.0%} of the tokens do not depend on attention"
