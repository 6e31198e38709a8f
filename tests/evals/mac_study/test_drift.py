"""Decoding with the method itself: against attention measured by other means, and what must be nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from longreach import MAC
from longreach.errors import InvalidInput
from longreach.evals.mac_study import drift
from longreach.evals.mac_study.drift import Drift, Likeliest
from longreach.testing.tiny import random_tokens, tiny_model

SMALL = MAC(window=16, band=4, tau=0.0, min_context=0, rest_rows=None, max_reuse_depth=2)
PROMPT = tuple(random_tokens(1, 60)[0].tolist())


class Tokenizer:
    eos_token_id = 7


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=3)


def test_divergence_over_the_likeliest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    p, q = a.double().softmax(0), b.double().softmax(0)
    whole = float((p * (p / q).log()).sum())
    assert float(Likeliest.of(a).divergence(b)) == pytest.approx(whole, rel=1e-6)
    monkeypatch.setattr(drift, "TOP", 10)
    some = p.topk(10).indices
    rest = (1 - p[some].sum(), 1 - q[some].sum())
    want = float((p[some] * (p[some] / q[some]).log()).sum() + rest[0] * (rest[0] / rest[1]).log())
    assert float(Likeliest.of(a).divergence(b)) == pytest.approx(want, rel=1e-6) and want < whole
    assert float(Likeliest.of(a).divergence(a)) == pytest.approx(0, abs=1e-12)


def test_errors_depths_and_what_is_never_reused(model: Any) -> None:
    never, free = replace(SMALL, band=1000), replace(SMALL, max_reuse_depth=None)
    prompt = (5, 9) * 30  # queries that are alike
    what = Drift(model, Tokenizer(), prompt, {"never": never, "two": SMALL, "free": free}, steps=24)
    found = what.run(chunk=32)
    assert found["prompt_tokens"] == 60 and found["edges"] == [24 * n // 16 for n in range(17)]
    assert len(what.tokens) >= 24 and 7 not in [int(t) for t in what.tokens]
    none, two, more = (found["methods"][name] for name in ("never", "two", "free"))
    assert max(max(x) for x in none["error"]) < 1e-5 and max(none["kl"]) < 1e-6 and none["agree"] == [1.0] * 16
    assert none["reuse"] == [0.0] * 3 and all(row[0] == 1.0 for row in none["depths"])
    assert two["depth_bins"] == [0, 1, 2, 4, 8, 16, 32] and max(two["reuse"]) > 0 and max(max(two["error"])) > 0.01
    for row in (*two["depths"], *more["depths"]):
        assert sum(row) == pytest.approx(1)
    assert all(sum(row[3:]) == 0 for row in two["depths"]) and any(sum(row[3:]) > 0 for row in more["depths"])
    assert all(math.isfinite(x) and x >= 0 for x in two["kl"]) and max(two["kl"]) > 1e-6
    assert two["method"]["max_reuse_depth"] == 2 and more["method"]["max_reuse_depth"] is None


def test_the_same_seed_the_same_numbers_and_few_steps(model: Any) -> None:
    first, again = (Drift(model, Tokenizer(), PROMPT, {"two": SMALL}, steps=5, seed=3) for _ in range(2))
    assert first.run(chunk=512) == again.run(chunk=512) and first.edges == [0, 1, 2, 3, 4, 5]
    other = Drift(model, Tokenizer(), PROMPT, {"two": SMALL}, steps=5, seed=4)
    other.run(chunk=512)
    assert [int(t) for t in other.tokens[:5]] != [int(t) for t in first.tokens[:5]]


def test_errors_are_those_that_the_methods_own_probe_finds(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[Any] = []
    plain = Drift._told

    def told_of(self: Drift, lost: Any, same: Any, errors: Any, notes: Any) -> Any:
        probes.extend(sum(notes[n]["error"]) / 4 for n in range(3))
        return plain(self, lost, same, errors, notes)

    monkeypatch.setattr(Drift, "_told", told_of)
    what = Drift(model, Tokenizer(), PROMPT, {"probed": replace(SMALL, probe_every=1)}, steps=24)
    (told,) = what.run(chunk=512)["methods"].values()
    mean = torch.tensor(told["error"]).double()  # [bins, layers]
    width = torch.tensor([b - a for a, b in pairwise(what.edges)]).double()
    assert max(probes) > 0.01 and probes == pytest.approx(
        ((mean * width[:, None]).sum(0) / 24).tolist(), rel=1e-3, abs=1e-6
    )


def test_nll_is_that_of_the_tokens_drawn_and_reads_are_the_methods(model: Any) -> None:
    never = replace(SMALL, band=1000)
    what = Drift(model, Tokenizer(), PROMPT, {"never": never, "two": SMALL}, steps=12)
    found = what.run(chunk=512)["methods"]
    ids = torch.tensor([[*PROMPT, *(int(t) for t in what.tokens[:13])]])
    with torch.inference_mode():
        log_p = model(ids).logits[0].double().log_softmax(-1)
    want = [-float(log_p[60 + n, ids[0, 61 + n]]) for n in range(12)]
    assert found["never"]["nll_dense"] == pytest.approx(want, rel=1e-4)
    assert found["never"]["nll"] == pytest.approx(want, rel=1e-4)
    assert found["two"]["nll_dense"] == found["never"]["nll_dense"] != found["two"]["nll"]
    assert found["never"]["reads"]["keys"] == 0.5 > found["two"]["reads"]["keys"]


def test_methods_that_were_measured_are_taken_over(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free = replace(SMALL, max_reuse_depth=None)
    kept: dict[str, Any] = {}
    whole = Drift(model, Tokenizer(), PROMPT, {"two": SMALL, "free": free}, steps=6).run(512, keep=kept.__setitem__)
    assert [json.loads(json.dumps(x)) for x in kept.values()] == list(whole["methods"].values())
    again = Drift(model, Tokenizer(), PROMPT, {"two": SMALL, "free": free}, steps=6)
    first = {again.key(SMALL): kept[again.key(SMALL)]}
    assert again.run(512, done=first) == whole
    other = Drift(model, Tokenizer(), PROMPT, {"two": SMALL}, steps=5)
    assert other.key(SMALL) not in kept
    monkeypatch.setattr(Drift, "_measure", None)
    assert again.run(512, done=kept) == whole


def test_layers_with_windows(model: Any) -> None:
    gemma = tiny_model("gemma2", num_hidden_layers=4)
    (told,) = Drift(gemma, Tokenizer(), PROMPT, {"two": SMALL}, steps=6).run(chunk=512)["methods"].values()
    assert len(told["depths"]) == 4 and all(len(x) == 4 for x in told["error"])


def test_what_cannot_be(model: Any) -> None:
    with pytest.raises(InvalidInput, match="at least 1"):
        Drift(model, Tokenizer(), PROMPT, {}, steps=0)
    with pytest.raises(InvalidInput, match="context is 4096"):
        Drift(model, Tokenizer(), PROMPT, {"two": SMALL}, steps=5000)
