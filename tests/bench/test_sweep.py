"""Candidates that fail or are wrong are named, not timed; a baseline without any is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.bench import sweep
from longreach.bench.case import Case, Memory, Shape
from longreach.bench.competitor import Competitor, ours
from longreach.bench.inputs import Inputs


@pytest.fixture
def made() -> Inputs:
    return Inputs(Case("it", "group", Shape(1, 64, 1, 4, 2, 16, "float32")), torch.device("cpu"))


def good(made: Inputs) -> Competitor:
    return ours(made, Memory(16), 1, "reference")


def wrong(made: Inputs) -> Competitor:
    whole = good(made)
    return Competitor("", "flashinfer", Memory(16), 1, whole.calls, lambda partial: partial.out * 1.1)


def broken(made: Inputs) -> Competitor:
    raise RuntimeError("no such\nkernel")


def offer(monkeypatch: pytest.MonkeyPatch, made: Inputs, **builds: Any) -> None:
    found = [({"page": 16, "way": name}, lambda build=build: build(made)) for name, build in builds.items()]
    monkeypatch.setattr(sweep, "candidates", lambda name, inputs: found)


def test_only_right_candidates_compete(monkeypatch: pytest.MonkeyPatch, made: Inputs) -> None:
    offer(monkeypatch, made, wrong=wrong, broken=broken, good=good)
    chosen, tried = sweep.best("flashinfer", made, lambda line: None)
    assert [c.name for c in chosen] == ["FlashInfer page 16, good"]
    refused = {t.settings["way"]: t.refused for t in tried}
    assert refused["good"] is None and refused["broken"] == "no such kernel"
    assert "relative error" in str(refused["wrong"])
    assert [t.settings["way"] for t in tried if t.microseconds is not None] == ["good"]


def test_a_baseline_without_a_candidate_that_works_fails(monkeypatch: pytest.MonkeyPatch, made: Inputs) -> None:
    offer(monkeypatch, made, broken=broken)
    with pytest.raises(sweep.BaselineFailed, match=r"no such kernel.*--without flashinfer"):
        sweep.best("flashinfer", made, lambda line: None)
