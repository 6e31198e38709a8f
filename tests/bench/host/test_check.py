"""MagicPIG's step is compared with fp64 whoever computes it: kernels that make no lists too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach import attach
from longreach.adapters.transformers.synthetic import random_llama
from longreach.bench.cases import CASES, tiny
from longreach.bench.check_method import LayerErrors, attended
from longreach.bench.decoding import Decoding
from longreach.bench.host import check
from longreach.bench.host.check import keys_of, rounding_error
from longreach.bench.host.fill import fill_host
from longreach.cache import CacheConfig
from longreach.methods.dense import Dense
from longreach.methods.magicpig import MagicPIG

TOKENS = 150


def errors(impl: str, share: str, method_of_check: Any = None) -> LayerErrors:
    """Of one step of a model of three layers, the second of which is dense."""
    model = random_llama(
        layers=3, hidden=64, feed_forward=96, vocabulary=264, heads=4, kv_heads=2, dim=16, dtype=torch.float32,
        device=torch.device("cpu"), seed=0,
    )  # fmt: skip
    method = MagicPIG(bits=4, tables=9, share=share, local=16, seal=16, centre=32, dense_layers=(1,))  # type: ignore[arg-type]
    with attach(model, decode=method, impl=impl) as session, torch.no_grad():
        cache = session.new_cache(2, CacheConfig(capacity=TOKENS + 1, host=True))
        fill_host(cache, model, method, TOKENS, 0, impl, lambda: 0.0)
        session.on_layer = layers = LayerErrors(method_of_check or keys_of("it", cache, method))
        model(torch.zeros(2, 1, dtype=torch.int64), past_key_values=cache)
    return layers


@pytest.mark.parametrize("share", ["group", "own"])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_every_layer_is_right_over_its_sample(impl: str, share: str) -> None:
    found = errors(impl, share)
    assert sorted(found.worst) == [0, 1, 2] and all(0 < error < 1e-5 for error in found.worst.values())


def test_other_keys_than_the_sample_are_seen() -> None:
    """What kernels without lists count as read does not name the keys."""
    found = errors("triton", "group", attended)
    assert found.worst[0] > 0.01 < found.worst[2] and found.worst[1] < 1e-5


def test_other_methods_are_compared_over_the_keys_that_they_report() -> None:
    assert keys_of("it", None, Dense()) is attended  # type: ignore[arg-type]


def test_rounding_is_measured_over_a_part_of_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fp32 steps it is some 1e-6; the keys that it reads are limited."""
    bench = Decoding(torch.device("cpu"), without=(), quick=True, seed=0, say=lambda line: None)
    case = tiny(CASES["host-96k-b1"])
    model, _ = bench.model(case)
    few = rounding_error(bench, replace(case, shape=replace(case.shape, context=64)), model)
    assert 1e-7 < few < 2e-5
    monkeypatch.setattr(check, "KEYS", 64)
    assert rounding_error(bench, case, model) == few
