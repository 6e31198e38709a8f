"""Evaluations of methods that sample keys: search and attention apart, and the shares that were sampled."""

from __future__ import annotations

import pytest

from longreach.evals.sampling import mean_of
from longreach.testing.tiny import tiny_model
from tests.evals.test_evaluate import evaluation, run

METHODS = [
    "magicpig error_bars=True bits=3 tables=9 local=4 seal=4 centre=8 dense_layers=[0]",
    "streaming_llm sinks=2 window=12",
]


def test_an_evaluation_keeps_what_was_sampled() -> None:
    made = evaluation(tiny_model("llama", eos_token_id=258), methods=METHODS)
    task = run(made)["letters"]
    dense, sampled, window = task["results"].values()
    assert "sampling" not in dense and "sampling" not in window
    found = sampled["sampling"]
    assert found["layers"] == [1]
    assert len(found["sampled_head"]) == len(found["sampled_group"]) == 1
    assert 0 < found["sampled_head"][0] <= found["sampled_group"][0] < 1 and found["table_share"] > 0
    # two layers, of which one is dense: half of what dense attention reads, and half of the sampled layer's
    assert sampled["decode_reads"]["total"] == pytest.approx(0.5 + (found["search"] + found["attention"]) / 2)


def test_means_over_prompts() -> None:
    one = {"layers": [1, 3], "search_bytes": 10, "attention_bytes": 20, "error_bar_bytes": 0, "dense_bytes": 100,
           "rows": 10, "sampled_head": [0.1, 0.2], "sampled_group": [0.2, 0.2], "overflowed": [0.0, 0.0],
           "table_share": 0.4}  # fmt: skip
    other = one | {"search_bytes": 50, "error_bar_bytes": 10, "dense_bytes": 500, "rows": 30, "table_share": 0.3}
    other["sampled_head"] = [0.3, 0.2]
    none = one | {"rows": 0, "dense_bytes": 0, "search_bytes": 0, "attention_bytes": 0, "sampled_head": [0.0, 0.0]}
    assert mean_of([]) is None and mean_of([none]) is None
    found = mean_of([one, none, other])
    assert found is not None
    assert found["search"] == 0.1 and found["attention"] == pytest.approx(50 / 600) and found["table_share"] == 0.4
    assert found["sampled_head"] == pytest.approx([0.25, 0.2]) and found["layers"] == [1, 3]
