"""Captured decode steps of converted models: in pieces on fake graphs, on a GPU as one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longreach.adapters.transformers.loop.decoder as decoding
import longreach.adapters.transformers.loop.run as running
from longreach import CacheConfig, attach, generate
from tests.adapters.transformers.fake_graph import FakeGraph
from tests.adapters.transformers.mka.models import HASH, RECALL, SMALL, THREE, TWO, converted
from tests.adapters.transformers.reference import padded_batch

STEPS = 20
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("fastmka", TWO),
    "fixed": ("fastmka", {"routing": "fixed", "summary": "mean"}),
    "top1": ("fastmka", {"routing": "top1"}),
    "three": ("fastmka", THREE),
    "hash": ("fastmka", HASH),
    "recall": ("fastmka", RECALL),
    "mka": ("mka", {**SMALL, "recall": "summary"}),
    "gated": ("mka", {**SMALL, "mode": "gated", "recall": "bounds"}),
    "block": ("block_mka", {**SMALL, "recall": "summary"}),
    "index": ("block_mka", {**SMALL, "recall": "index", "features": 8, "share": (0,)}),
}
each = pytest.mark.parametrize("name", MODELS)


def made(name: str, place: str = "cpu") -> Any:
    variant, options = MODELS[name]
    return converted("llama", variant, **options).to(place)


@each
@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=8)], ids=["contiguous", "paged"])
@pytest.mark.covering
def test_pieces_give_the_tokens_of_uncaptured_steps(
    name: str, config: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is read and written at fixed addresses, and nothing of a step is decided on the host."""
    graphs: list[FakeGraph] = []

    def begin() -> FakeGraph:
        graphs.append(FakeGraph())
        return graphs[-1]

    def how(session: Any, graph: Any) -> Any:
        return (None, "graph=False") if graph is False else ("piecewise", "as asked")

    monkeypatch.setattr(decoding, "cuda_graphs", lambda device: begin)
    monkeypatch.setattr(running, "capture_for", how)
    model, (tokens, mask) = made(name), padded_batch((40, 23))
    with attach(model, cache=config) as session:
        found, reports = [], []
        for graph in (False, None, None):
            session.reset_report()
            found.append(generate(session, tokens, mask, max_new_tokens=STEPS, graph=graph, compile="none"))
            reports.append(session.report())
        recorded = len(graphs)
        end = int(found[0].tokens[0, 9])
        cut = generate(session, tokens, mask, max_new_tokens=STEPS, compile="none", eos_token_id=end)
        plain = generate(session, tokens, mask, max_new_tokens=STEPS, graph=False, eos_token_id=end)
    assert [x.captured for x in found] == [None, "piecewise", "piecewise"]
    assert torch.equal(found[1].tokens, found[0].tokens) and torch.equal(found[2].tokens, found[0].tokens)
    assert torch.equal(cut.tokens, plain.tokens)
    assert reports[1] == reports[0] and reports[2] == reports[0]
    assert recorded in (4, 8)  # two layers; again where state has grown


@pytest.mark.sweep  # on a CPU nothing is captured
@pytest.mark.gpu
@each
def test_one_graph_gives_the_tokens_of_uncaptured_steps(name: str) -> None:
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model, (tokens, mask) = made(name, place), (x.to(place) for x in padded_batch((40, 23)))
    with attach(model) as session:
        plain = generate(session, tokens, mask, max_new_tokens=STEPS, graph=False)
        for _ in range(2):
            got = generate(session, tokens, mask, max_new_tokens=STEPS)
            assert got.captured == ("full" if place == "cuda" else None)
            assert torch.equal(got.tokens, plain.tokens)
        end = int(plain.tokens[0, 9])
        ended = [
            generate(session, tokens, mask, max_new_tokens=STEPS, eos_token_id=end, graph=g) for g in (False, None)
        ]
        assert torch.equal(ended[0].tokens, ended[1].tokens)
