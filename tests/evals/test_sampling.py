"""Evaluations of methods that sample keys: search and attention apart, and the shares that were sampled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longreach.evals.sampling import mean_bars, mean_of, sampling_of
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
    assert 0 < found["sampled_head"][0] <= found["sampled_group"][0] < 1 and found["tables_over_kv"] > 0
    bars = sampled["error_bars"]
    assert bars["layers"] == [1] and bars["relative_error"][0] > 0 and bars["redone"] == [0.0] and bars["bytes"] > 0
    # two layers, of which one is dense: half of what dense attention reads, and half of the sampled layer's
    parts = found["search"] + found["attention"] + bars["bytes"]
    assert sampled["decode_reads"]["total"] == pytest.approx(0.5 + parts / 2)
    assert "error_bars" not in dense and "error_bars" not in window


def test_error_bars_of_methods_without_tables() -> None:
    """They do not count the bytes of bars separately."""
    made = evaluation(tiny_model("llama", eos_token_id=258), methods=["oracle_sampling k=0.2 redo=0.0"])
    _, sampled = run(made)["letters"]["results"].values()
    assert "sampling" not in sampled
    bars = sampled["error_bars"]
    assert bars["layers"] == [0, 1] and all(x > 0 for x in bars["relative_error"]) and "bytes" not in bars
    assert bars["redone"] == pytest.approx([1.0, 1.0])


def test_mean_error_bars() -> None:
    """By rows, layer by layer; prompts without keys in the tables count only in bytes."""
    one = {"layers": [0, 1], "rows": [10, 20], "relative_error": [0.1, 0.2], "redone": [0.0, 0.5], "bytes": 30,
           "dense_bytes": 100}  # fmt: skip
    other = one | {"layers": [1], "rows": [20], "relative_error": [0.4], "redone": [0.0], "bytes": 10}
    none = one | {"rows": [0, 0], "relative_error": [0.0, 0.0], "redone": [0.0, 0.0], "bytes": 0}
    assert mean_bars([]) is None and mean_bars([none]) is None
    found = mean_bars([one, none, other])
    assert found is not None and found["layers"] == [0, 1] and found["bytes"] == pytest.approx(40 / 300)
    assert found["relative_error"] == pytest.approx([0.1, 0.3]) and found["redone"] == pytest.approx([0.0, 0.25])
    assert "bytes" not in (mean_bars([one | {"bytes": None}]) or {})


def test_means_over_prompts() -> None:
    one = {"layers": [1, 3], "search_bytes": 10, "attention_bytes": 20, "dense_bytes": 100, "rows": 10,
           "sampled_head": [0.1, 0.2], "sampled_group": [0.2, 0.2], "overflowed": [0.0, 0.0],
           "table_bytes": 40, "kv_bytes": 100}  # fmt: skip
    other = one | {
        "search_bytes": 50,
        "dense_bytes": 500,
        "rows": 30,
        "table_bytes": 30,
        "kv_bytes": 200,
    }
    other["sampled_head"] = [0.3, 0.2]
    none = one | {"rows": 0, "dense_bytes": 0, "search_bytes": 0, "attention_bytes": 0, "sampled_head": [0.0, 0.0]}
    assert mean_of([]) is None and mean_of([none]) is None
    found = mean_of([one, none, other])
    assert found is not None
    assert found["search"] == 0.1 and found["attention"] == pytest.approx(40 / 600)
    assert found["tables_over_kv"] == pytest.approx(110 / 400)
    assert found["sampled_head"] == pytest.approx([0.25, 0.2]) and found["layers"] == [1, 3]


def test_memory_of_tables_is_that_of_all_layers() -> None:
    """Not that of the layer with the largest tables."""

    def layer(number: int, tables: int) -> Any:
        notes = {"search_bytes": 1, "attention_bytes": 2, "sampled_rows": 3, "sampled_head": [0.1, 0.3],
                 "sampled_group": [0.2, 0.4], "overflowed": [0.0, 0.0], "table_bytes_per_sequence": tables,
                 "kv_bytes_per_sequence": 100, "table_share": tables / 100}  # fmt: skip
        return SimpleNamespace(phase="decode", layer=number, notes=notes, dense_bytes=50)

    report: Any = SimpleNamespace(layers=[layer(0, 10), layer(1, 130)])
    found = sampling_of(report)
    assert found is not None and found["table_bytes"] == 140 and found["kv_bytes"] == 200
    whole = mean_of([found])
    assert whole is not None and whole["tables_over_kv"] == 0.7
    assert whole["sampled_head"] == pytest.approx([0.2, 0.2])
