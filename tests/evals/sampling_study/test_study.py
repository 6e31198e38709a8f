"""The whole study on tiny models, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.errors import InvalidInput, Unsupported
from longreach.evals.sampling_study import SamplingStudy
from longreach.evals.sampling_study.panel import BITS, PAPER_4
from longreach.methods.magicpig import PRESETS
from longreach.tasks import registry
from longreach.testing.tiny import tiny_model, tiny_tokenizer


def study(family: str = "llama", **settings: Any) -> SamplingStudy:
    given = {"length": 900, "samples": 2, "rows": 2, "ablations": False, **settings}
    return SamplingStudy(tiny_model(family), tiny_tokenizer(), registry.choose("niah_single_2"), **given)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return study(ablations=True).run(300)


def test_everything_is_measured(found: dict[str, Any]) -> None:
    results = found["results"]
    assert [s["task"] for s in found["samples"]] == ["niah_single_2"] * 2 and found["samples"][1]["number"] == 1
    for bits, tables in (*PRESETS, *PAPER_4):
        for share in ("own", "group"):
            mine = results["methods"][f"magicpig bits={bits} tables={tables} share={share}"]
            assert mine["method"]["share"] == share and mine["method"]["centre"] == 225
            assert 0 < mine["median"] < 2 and [len(layer) for layer in mine["errors"]] == [4, 4]
    assert set(results["left_out"]) == {"loki", "kascade"}
    assert [bits for bits, _ in results["fitted"]["pairs"]] == list(BITS)
    assert {f"magicpig bits={b} tables={t} share=own" for b, t in results["fitted"]["pairs"]} <= {*results["methods"]}
    assert results["geometry"]["first_keys"]["min"][0] == pytest.approx([1, 1])  # prompts begin with the same token
    assert min(results["geometry"]["first_keys_other"]["min"][0]) < 0.9
    for name in ("iid", "systematic"):
        error = results["estimators"][name]["mean"]
        assert error == sorted(error, reverse=True)


def test_the_same_numbers_again_and_others_by_seed(found: dict[str, Any]) -> None:
    again, other = study().run(300)["results"], study(seed=1, samples=1).run(300)["results"]
    for label, mine in again["methods"].items():  # the ablations draw nothing from the study's generator
        assert mine == found["results"]["methods"][label]
    assert again["estimators"] == found["results"]["estimators"] != other["estimators"]
    assert again["fitted"]["pairs"] == []


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_layers_with_windows_are_none(family: str) -> None:
    results = study(family, samples=1).run(300)["results"]
    windows = results["windows"]
    assert None in windows and any(windows)
    for mine in (*results["methods"].values(), *results["top_k_in_place"].values()):
        assert [layer is None for layer in mine["errors"]] == [w is not None for w in windows]
    assert results["geometry"]["mean_keys"]["min"] == [None, None]  # one prompt only


def test_what_cannot_be_measured_is_refused() -> None:
    for settings, words in (
        ({"samples": 0}, "samples: expected at least 1"),
        ({"rows": 0}, "rows: expected at least 1"),
        ({"length": 900, "centre": 860}, "lower --rows or --centre"),
        ({"length": 99999}, "context"),
    ):
        with pytest.raises(InvalidInput, match=words):
            study(**settings)
    with pytest.raises(Unsupported, match="sliding window"):
        study("mistral", samples=1).run(300)
