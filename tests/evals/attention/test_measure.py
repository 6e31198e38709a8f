"""Every measure, through the whole run, is what its definition gives over transformers' own attention matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from longreach.adapters.transformers import attach, rotary_hook
from longreach.adapters.transformers.rotary import find_rotation
from longreach.errors import InvalidInput, Unsupported
from longreach.evals.attention import Attention
from longreach.evals.attention.masses import distances
from longreach.evals.attention.prompts import TASKS
from longreach.testing.tiny import tiny_model, tiny_tokenizer
from tests.evals.attention import brute
from tests.tiers import swept

LENGTH, ROWS = 941, 3
FAMILIES = ("llama", "gpt_oss", "gemma2", "glm4")


def close(found: Any, expected: Any, slack: float = 2e-5) -> None:
    np.testing.assert_allclose(np.array(found, dtype=float), np.array(expected, dtype=float), rtol=1e-4, atol=slack)


@pytest.fixture(scope="module", params=swept(("gpt_oss", "llama", "gemma2", "glm4"), 1))
def family(request: pytest.FixtureRequest) -> Any:
    model = tiny_model(request.param)
    task = Attention(model, tiny_tokenizer(), length=LENGTH, samples=1, rows=ROWS, seed=3)
    return request.param, model, task, task.run(chunk=97)


@pytest.fixture(scope="module")
def exact(family: Any) -> list[tuple[Any, list[int], np.ndarray, np.ndarray]]:
    _, model, task, _ = family
    every = [(p, [*p.tokens, *p.answer]) for p in task.prompts]
    return [(p, tokens, *brute.matrices(model, tokens)) for p, tokens in every]


def test_masses_and_queries(family: Any, exact: Any) -> None:
    _, _, _, found = family
    edges = distances(LENGTH)
    assert found["results"]["distance_edges"] == edges
    for kind in ("text", "answer"):
        rows = found["results"]["rows"][kind]
        chosen = [(w, q, row) for p, _, w, q in exact for row in (p.text if kind == "text" else p.rows)]
        assert rows["count"] == len(chosen)
        for layer in range(2):
            for head in range(4):
                each = [brute.masses(w[layer, head, row], row, edges) for w, _, row in chosen]
                each = [e | brute.likeness(q[layer, :, head], row) for e, (_, q, row) in zip(each, chosen, strict=True)]
                for name in each[0]:
                    # a key more or less may hold what rounding leaves of 95%
                    slack = 1.01 / len(chosen) if name == "cover" else 2e-5
                    close(rows[name][layer][head], np.mean([e[name] for e in each], 0), slack)


def test_distances_and_sinks_make_one(family: Any) -> None:
    for rows in family[3]["results"]["rows"].values():
        close(np.sum(rows["distance"], -1) + np.array(rows["sinks"]), np.ones((2, 4)))


def test_windows_and_virtual_sinks_are_told(family: Any) -> None:
    name, model, _, found = family
    kinds = getattr(model.config, "layer_types", ["full_attention"] * 2)
    expected = [16 if kind == "sliding_attention" else None for kind in kinds]
    assert found["results"]["windows"] == expected and (name in ("llama", "glm4")) == (expected == [None, None])
    for rows in found["results"]["rows"].values():
        assert (np.array(rows["virtual_sink"]) > 1e-3).any() == (name == "gpt_oss")
        for layer, window in enumerate(expected):
            if window:
                close(np.array(rows["tops"][layer])[:, 0], np.ones(4))  # 16 keys are all there are
                close(rows["sinks"][layer], np.zeros(4))


def test_agreement(family: Any, exact: Any) -> None:
    _, model, _, found = family
    for kind in ("text", "answer"):
        chosen = [(w, row) for p, _, w, _ in exact for row in (p.text if kind == "text" else p.rows)]
        expected = brute.agreement(chosen, model.config.num_key_value_heads)
        maps = found["results"]["rows"][kind]["agreement"]
        close(maps["recall"], expected["recall"], 1.01 / brute.K)  # rounding may choose between the last of 256 keys
        assert maps["mass"][1][0] is None and maps["recall"][0][1] < 0.9
        close([maps["mass"][a][b] for a, b in ((0, 0), (0, 1), (1, 1))], expected["mass"][[0, 0, 1], [0, 1, 1]])


def test_retrieval(family: Any, exact: Any) -> None:
    _, _, _, found = family
    for name in TASKS:
        each = [brute.retrieval(w, tokens, row, p.needle) for p, tokens, w, _ in exact for row in p.rows
                if p.task == name]  # fmt: skip
        measured = found["results"]["retrieval"][name]
        close(measured["score"], np.mean([copies for copies, _ in each], 0))
        close(measured["needle"], np.mean([mass for _, mass in each], 0))


def test_chunks_make_no_difference(family: Any) -> None:
    _, model, _, found = family
    again = Attention(model, tiny_tokenizer(), length=LENGTH, samples=1, rows=ROWS, seed=3).run(chunk=1000)
    assert again["samples"] == found["samples"]
    for kind in ("text", "answer"):
        for name in ("sinks", "windows", "distance", "tops", "previous", "best", "virtual_sink"):
            close(again["results"]["rows"][kind][name], found["results"]["rows"][kind][name])


def test_samples_say_what_was_asked_and_answered(family: Any, exact: Any) -> None:
    _, model, _, found = family
    assert [s["task"] for s in found["samples"]] == list(TASKS)
    for sample, (prompt, tokens, *_) in zip(found["samples"], exact, strict=True):
        assert sample["tokens"] == len(prompt.tokens) and sample["answer_tokens"] == len(prompt.answer) == 7
        assert sample["right"] == _right(model, tokens, prompt.rows)
    attach(model).close()  # nothing stayed attached


def _right(model: Any, tokens: list[int], rows: range) -> int:
    with torch.no_grad():
        guesses = model(torch.tensor([tokens]), use_cache=False).logits[0].argmax(-1)
    return sum(int(guesses[row]) == tokens[row + 1] for row in rows)


def test_queries_of_a_layer_whose_rotation_is_unknown_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(layer: Any, args: Any, kwargs: Any) -> Any:
        return "a layout of its own" if layer.layer_idx == 1 else find_rotation(layer, args, kwargs)

    monkeypatch.setattr(rotary_hook, "find_rotation", unknown)
    task = Attention(tiny_model("llama"), tiny_tokenizer(), length=LENGTH, samples=1, rows=2)
    found = task.run()["results"]
    assert "a layout of its own" in found["queries_unknown"]["1"] and set(found["queries_unknown"]) == {"1"}
    rows = found["rows"]["text"]
    assert rows["best"][1] is None and rows["match"][1] is None and len(rows["best"][0]) == 4
    assert rows["sinks"][1] is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 0}, "samples: expected at least 1, got 0"),
        ({"rows": 0}, "rows: expected at least 1, got 0"),
        ({"length": 5000}, "context is 4096"),
        ({"length": 300}, "niah_single_2"),
        ({"rows": 4000}, "lower --rows"),
    ],
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Attention(tiny_model("llama"), tiny_tokenizer(), **{"length": LENGTH, "samples": 1, "rows": 2, **options})


def test_a_tokenizer_that_does_not_say_where_its_tokens_are() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(Unsupported, match="Slow gives no text offsets"):
        Attention(tiny_model("llama"), Slow(), length=LENGTH, samples=1, rows=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_gpu_measures_the_same(name: str) -> None:
    model = tiny_model(name)
    here = Attention(model, tiny_tokenizer(), length=LENGTH, samples=1, rows=ROWS).run(chunk=97)["results"]["rows"]
    there = Attention(model.to("cuda"), tiny_tokenizer(), length=LENGTH, samples=1, rows=ROWS).run()["results"]["rows"]
    for kind in ("text", "answer"):
        for measure in ("sinks", "windows", "distance", "tops", "previous", "best", "virtual_sink"):
            close(there[kind][measure], here[kind][measure], 1e-3)
        close(there[kind]["agreement"]["recall"], here[kind]["agreement"]["recall"], 0.02)
