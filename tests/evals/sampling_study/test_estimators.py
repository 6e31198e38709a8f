"""Estimates with exact scores against the same in fp64 by loops, and how their errors fall."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.evals.sampling_study import estimators
from longreach.evals.sampling_study.estimators import (
    BUDGETS,
    DRAWS,
    SHARES,
    SINKS,
    best_of_group,
    iid,
    mass_of_best,
    systematic,
    top_k,
)
from longreach.evals.sampling_study.exact import Exact
from tests.evals.sampling_study.small import HEADS, KEYS, KV_HEADS, ROWS, call, weights

TERMS: list[dict[str, Any]] = [{}, {"softcap": 2.0}, {"sink_logit": torch.tensor([1.0, 4.0, -1.0, 6.0])}]
EVERY = [(row, head) for row in range(ROWS) for head in range(HEADS)]


@pytest.mark.parametrize("terms", TERMS, ids=["plain", "softcap", "sink"])
def test_exact_attention_is_that_of_fp64(terms: dict[str, Any]) -> None:
    made = call(**terms)
    exact = Exact.of(made)
    for row, head in EVERY:
        share, v, sink = weights(made, row, head)
        torch.testing.assert_close(exact.share[row, head, : len(share)].double(), share, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(exact.out[row, head].double(), share @ v, rtol=1e-4, atol=1e-5)
        assert float(exact.sink[row, head]) == pytest.approx(sink, rel=1e-4)
        assert not exact.share[row, head, len(share) :].any()  # the rows after it


@pytest.mark.parametrize("terms", TERMS, ids=["plain", "softcap", "sink"])
def test_top_k_and_mass_are_those_of_fp64(terms: dict[str, Any]) -> None:
    made = call(**terms)
    exact = Exact.of(made)
    found, masses = top_k(exact), mass_of_best(exact.share, exact.context)
    for row, head in EVERY:
        share, v, sink = weights(made, row, head)
        for (read, error), budget in zip(found, BUDGETS, strict=True):
            count = -(-len(share) * round(budget * 1000) // 1000)
            best = share.argsort(descending=True)[:count]
            out = share[best] @ v[best] / (share[best].sum() + sink)
            assert float(read[row, head]) == pytest.approx(count / len(share))
            assert float(error[row, head]) == pytest.approx(float((out - share @ v).norm() / (share @ v).norm()), 1e-3)
        for n, part in enumerate(SHARES):
            for name, keys in (("all", share), ("without_first", share[SINKS:])):
                count = -(-len(keys) * round(part * 1000) // 1000)
                held = keys.sort(descending=True).values[:count].sum() / keys.sum()
                assert float(masses[name][row, head, n]) == pytest.approx(float(held), 1e-4)


def test_the_best_of_a_group_with_and_without_keys_that_are_always_read() -> None:
    made = call()
    exact = Exact.of(made)
    count = torch.tensor([[20, 40]]).expand(ROWS, -1)
    always = torch.zeros(ROWS, KV_HEADS, KEYS, dtype=torch.bool)
    always[..., :4] = True
    plain, more = best_of_group(exact, count), best_of_group(exact, count, always)
    for row, head in EVERY:
        group = [weights(made, row, h)[0] for h in range(head // 2 * 2, head // 2 * 2 + 2)]
        share, v, _ = weights(made, row, head)
        for first, error in ((0, plain), (4, more)):
            pooled = sum(group)
            assert isinstance(pooled, torch.Tensor)
            best = pooled[first:].argsort(descending=True)[: int(count[row, head // 2])] + first
            best = torch.cat([torch.arange(first), best])
            out = share[best] @ v[best] / share[best].sum()
            assert float(error[row, head]) == pytest.approx(float((out - share @ v).norm() / (share @ v).norm()), 1e-3)


def test_errors_of_samples_fall_with_the_budget_and_systematic_ones_are_least() -> None:
    exact, random = Exact.of(call()), torch.Generator().manual_seed(0)
    drawn = torch.stack([torch.stack([torch.stack(p, -1) for p in iid(exact, random)], -1) for _ in range(6)])
    some = torch.stack([torch.stack([torch.stack(p, -1) for p in systematic(exact, random)], -1) for _ in range(6)])
    mean = {"iid": drawn.mean((0, 1, 2)), "systematic": some.mean((0, 1, 2))}  # [read and error, budgets]
    for read, error in mean.values():
        assert (read.diff() > 0).all() and (error.diff() < 0).all()
        assert error[-1] < error[0] / 3
    assert torch.allclose(mean["systematic"][0], torch.tensor(BUDGETS).double(), atol=2 / KEYS)
    # iid draws hit a key more than once, so they read fewer keys than they draw (Theorem 3.3)
    assert (mean["iid"][0] < torch.tensor(DRAWS) + 1 / KEYS).all() and mean["iid"][0][-1] < 1
    for part in (0.01, 0.1):  # as many draws
        assert mean["systematic"][1][BUDGETS.index(part)] < mean["iid"][1][DRAWS.index(part)]


def test_sums_over_samples_are_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the mean of n estimates falls as 1 / sqrt(n): no bias is left above it."""
    exact, random, outs = Exact.of(call()), torch.Generator().manual_seed(1), list[torch.Tensor]()
    error = Exact.error
    monkeypatch.setattr(estimators, "DRAWS", (0.3,))
    monkeypatch.setattr(Exact, "error", lambda self, out: outs.append(out) or error(self, out))
    for _ in range(256):
        iid(exact, random)
    few, many = (float(error(exact, torch.stack(outs[:n]).mean(0)).mean()) for n in (4, 256))
    assert many < few / 4
