"""Scores against the log-probabilities of one plain pass over context and continuation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach import MAC
from longreach.adapters.lm_eval.scoring import Scorer
from longreach.adapters.transformers import attach
from longreach.testing.tiny import random_tokens, tiny_model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
CONTEXTS = [40, 1, 7, 23]
CONTINUATIONS = [[5, 1], [3, 2, 9], [1], [12]]


def made(length: int, seed: int) -> list[int]:
    return random_tokens(1, length, seed=seed)[0].tolist()


@torch.no_grad()
def plainly(model: Any, context: list[int], tokens: list[int]) -> float:
    ids = torch.tensor([[*context, *tokens]], device=model.device)
    logs = model(ids).logits[0].double().log_softmax(-1)
    return float(sum(logs[len(context) + n - 1, token] for n, token in enumerate(tokens)))


def test_a_score_does_not_depend_on_what_was_scored_before() -> None:
    """Of a method whose state is overwritten by tokens that are taken back."""
    context, tokens = made(40, 1), [made(14, 2), made(11, 3)]
    with attach(tiny_model("llama"), decode=MAC(window=8, band=4, tau=0.0, min_context=0)) as session:
        scorer = Scorer(session, 512, "decode")
        first, second = scorer.score([context], [tokens])[0]
        assert scorer.score([context], [tokens[::-1]])[0] == [second, first]
        assert scorer.score([context], [[tokens[1], tokens[0], tokens[1]]])[0] == [second, first, second]


@pytest.mark.covering
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("by", ["prefill", "decode"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scores_are_the_log_probabilities_of_the_model(family: str, by: Any, chunk: int, device: str) -> None:
    model = tiny_model(family).to(device)
    contexts = [made(length, n) for n, length in enumerate(CONTEXTS)]
    wanted = [[made(length, 100 * n + length) for length in each] for n, each in enumerate(CONTINUATIONS)]
    expected = [[plainly(model, c, tokens) for tokens in each] for c, each in zip(contexts, wanted, strict=True)]
    with attach(model) as session:
        scorer = Scorer(session, chunk, by)
        for _ in range(2):  # the second time in the first one's memory
            found = [[score for score, _ in row] for row in scorer.score(contexts, wanted)]
            assert [len(row) for row in found] == [len(row) for row in expected]
            for row, truth in zip(found, expected, strict=True):
                assert row == pytest.approx(truth, rel=1e-4, abs=1e-4)
        one = scorer.score(contexts[1:2], wanted[1:2])[0]
        assert [score for score, _ in one] == pytest.approx(expected[1], rel=1e-4, abs=1e-4)
