"""Loki's calibration: the covariance of what a model's own attention is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach import attach
from longreach.adapters.transformers import shape_of
from longreach.evals.calibration.gather import gather
from longreach.evals.calibration.loki import LokiGather, calibrated
from longreach.evals.calibration.prompts import Prompt
from longreach.testing.tiny import random_tokens, tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=3)


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(f"p/{n}", tuple(random_tokens(1, length, seed=n)[0].tolist())) for n, length in enumerate(lengths)]


def keys_of(model: Any, prompt: Prompt) -> torch.Tensor:
    """[L, N, G, D]: the keys that a pass of the whole prompt puts into its cache."""
    found = []
    with torch.no_grad(), attach(model) as session:
        session.on_layer = lambda phase, call, outcome: found.append(call.kv.k[0, :, : len(prompt.tokens)].clone())
        model(torch.tensor([prompt.tokens]), past_key_values=session.new_cache())
    return torch.stack(found).transpose(1, 2)


@pytest.mark.parametrize("chunk", [512, 17])
def test_directions_are_those_of_the_covariance_over_all_prompts(model: Any, chunk: int) -> None:
    some = prompts(60, 33)
    found = calibrated(gather(model, some, LokiGather(shape_of(model)), chunk=chunk))
    keys = torch.cat([keys_of(model, p) for p in some], 1).double()
    for layer in range(3):
        for head in range(2):
            want = torch.cov(keys[layer, :, head].T, correction=0)
            basis, variance = found.basis[layer, head].double(), found.variance[layer, head].double()
            torch.testing.assert_close((basis * variance) @ basis.T, want, rtol=1e-4, atol=1e-5)


def test_what_an_earlier_run_kept_is_taken_over(model: Any) -> None:
    some, kept = prompts(40, 25, 31), dict[str, Any]()
    whole = gather(model, some, LokiGather(shape_of(model)), keep=kept.__setitem__)
    again = gather(model, some, LokiGather(shape_of(model)), done={"p/0": kept["p/0"], "p/2": kept["p/2"]})
    one, other = calibrated(whole), calibrated(again)
    assert torch.equal(one.basis, other.basis) and torch.equal(one.variance, other.variance)
