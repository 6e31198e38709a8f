"""Error bars against true errors: what is measured, on a tiny model, and how it is summed up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, Unsupported
from longreach.evals.sampling_study import ErrorBarStudy
from longreach.evals.sampling_study.error_bars import BarProbe, calibration
from longreach.evals.sampling_study.panel import state_of
from longreach.methods.base import Outcome
from longreach.methods.magicpig import PRESETS, MagicPIG
from longreach.methods.oracle_sampling import OracleSampling
from longreach.ops import Spans
from longreach.tasks import registry
from longreach.testing.tiny import tiny_model, tiny_tokenizer
from tests.evals.sampling_study.small import HEADS, KEYS, ROWS, call, weights


def study(family: str = "llama", **settings: Any) -> ErrorBarStudy:
    given = {"length": 900, "samples": 1, "rows": 2, **settings}
    return ErrorBarStudy(tiny_model(family), tiny_tokenizer(), registry.choose("niah_single_2,niah_single_1"), **given)


def test_sums() -> None:
    errors, bars = [0.1, 0.3, 0.5, 0.0], [0.1, 0.1, 0.25, 0.2]
    found = calibration(torch.tensor([errors, bars], dtype=torch.float64))
    assert found["outputs"] == 4 and found["covered"] == 0.75  # 0.3 exceeds two bars, 0.5 does not
    assert found["error"] == pytest.approx((0.35 / 4) ** 0.5) and found["bar"] == pytest.approx((0.1225 / 4) ** 0.5)
    assert found["ratio"] == pytest.approx(found["error"] / found["bar"])


def test_errors_and_bars_of_the_last_rows() -> None:
    """Those of the methods' own outcomes, against exact attention in fp64."""
    methods: dict[str, Any] = {
        "own": MagicPIG(4, 20, share="own", centre=64, capacity=1.0, dense_layers=(), error_bars=True),
        "group": MagicPIG(4, 20, centre=64, capacity=1.0, dense_layers=(), error_bars=True),
        "iid": OracleSampling(k=0.1, error_bars=True),
    }
    made, probe = call(), BarProbe(methods, (5, 6))
    dense = Outcome(made.attend(Spans.dense()))
    probe.begin("t", KEYS, lambda done: None)
    probe("prefill", made, dense)  # rows before the measured ones
    assert not probe.found
    probe.begin("t", KEYS - ROWS, lambda done: None)
    probe("prefill", made, dense)
    for label, method in methods.items():
        for seed, found in zip((5, 6), probe.found[label, "t"], strict=True):
            one, mine = replace(method, seed=seed), replace(made.observer(), phase="decode")
            outcome = one.run(mine, state_of(one, mine))
            assert outcome.relative_error is not None and found.shape == (2, ROWS * HEADS)
            for n, (error, bar) in enumerate(found.T.tolist()):
                row, head = divmod(n, HEADS)
                share, v, _ = weights(made, row, head)
                want, out = share @ v, outcome.partial.out[row, head].double()
                assert error == pytest.approx(float((out - want).norm() / want.norm()), rel=1e-3, abs=1e-5)
                relative = float(outcome.relative_error[row, head])
                assert bar == pytest.approx(relative * float(out.norm() / want.norm()), rel=1e-4)


def test_a_study() -> None:
    found = study(seeds=2, seed=3).run(300)
    assert [s["task"] for s in found["samples"]] == ["niah_single_2", "niah_single_1"]
    names = [f"magicpig bits={b} tables={t} share={s}" for b, t in PRESETS for s in ("own", "group")]
    draws = ["oracle_sampling k=0.05", "oracle_sampling k=0.05 draw=systematic"]
    assert list(found["results"]) == [*names, *draws]
    for label, mine in found["results"].items():
        assert mine["method"]["error_bars"] and set(mine["tasks"]) == {"niah_single_2", "niah_single_1"}
        each = mine["tasks"].values()
        # 2 prompts, 2 rows, 2 layers, 4 heads, 2 seeds
        assert mine["all"]["outputs"] == sum(x["outputs"] for x in each) == 64
        assert 0 < mine["all"]["covered"] <= 1, label
        mean = sum(x["error"] ** 2 for x in each) / 2
        assert mine["all"]["error"] == pytest.approx(mean**0.5, rel=1e-4)
    assert found["results"][names[0]]["method"]["centre"] == 225


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidInput, match="seeds: expected at least 1, got 0"):
        study(seeds=0)
    with pytest.raises(Unsupported, match="sliding window"):
        study("mistral").run(300)
