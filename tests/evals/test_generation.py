"""Free-running generation: texts are the method's own, and judged as one pass of the plain model judges them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from longreach.errors import InvalidInput, UnknownName
from longreach.evals.generation import NGRAM, Generation, first_divergence, repeated
from longreach.evals.methods import specs
from longreach.evals.perplexity import Text
from longreach.testing.tiny import BOS_ID, EOS_ID, tiny_model, tiny_tokenizer

LENGTH, STEPS = 60, 16
TEXT = Text("a.txt", "", 200, tuple(b"The hen laid an egg in the hay, and then another one. " * 4))
NEVER = "mac band=100000 min_context=0 rest_rows=None"
MAC = "mac tau=0 window=64 band=8 min_context=0 rest_rows=None"
SHORT = "streaming_llm sinks=1 window=4"
BOTH = f"streaming_llm/{SHORT} prefill.sinks=1 prefill.window=4"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def task_of(model: Any, methods: list[str], **options: Any) -> Generation:
    return Generation(
        model, tiny_tokenizer(), [TEXT], specs(methods), **{"length": LENGTH, "steps": STEPS, "limit": 2, **options}
    )


def measured(task: Generation, **options: Any) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """(results but for times, the tokens of each method after each window)."""
    kept: dict[str, Any] = {}
    found = task.run(13, keep=kept.__setitem__, **options)
    tokens = {label: [p[label]["tokens"] for p in kept.values() if label in p] for label in found}
    return untimed(found), tokens


def untimed(found: dict[str, Any]) -> dict[str, Any]:
    for result in found.values():
        for sample in result["samples"]:
            del sample["seconds_per_token"]
    return found


@torch.no_grad()
def logits(model: Any, window: list[int], tokens: list[int]) -> torch.Tensor:
    """[steps, V] that the plain model gives each token of a text."""
    return model(torch.tensor([[*window, *tokens]]), use_cache=False).logits[0, len(window) - 1 : -1].double()


@pytest.fixture(scope="module")
def found(model: Any) -> tuple[Generation, dict[str, Any], dict[str, list[list[int]]]]:
    task = task_of(model, [NEVER, MAC, SHORT, BOTH])
    return task, *measured(task)


def test_texts_are_judged_by_one_pass_of_the_plain_model(model: Any, found: Any) -> None:
    task, results, texts = found
    assert len(task.windows) == 2 and all(w[0] == BOS_ID and len(w) == LENGTH for w in task.windows)
    for label, tokens in texts.items():
        result = results[label]
        assert all(len(text) == STEPS and EOS_ID not in text for text in tokens)
        nll = torch.stack([
            F.cross_entropy(logits(model, *both), torch.tensor(both[1]), reduction="none")
            for both in zip(task.windows, tokens, strict=True)
        ])  # fmt: skip
        assert result["nll"] == pytest.approx(float(nll.mean()), rel=1e-5)
        assert result["by_window"] == pytest.approx(nll.mean(1).tolist(), rel=1e-5)
        quarters = result["by_position"]
        assert [q["start"] for q in quarters] == [LENGTH, LENGTH + 4, LENGTH + 8, LENGTH + 12]
        for q in quarters:
            assert q["nll"] == pytest.approx(float(nll[:, q["start"] - LENGTH : q["stop"] - LENGTH].mean()), rel=1e-5)
        over = [mine - theirs for mine, theirs in zip(result["by_window"], results["dense"]["by_window"], strict=True)]
        assert result["over_dense"] == pytest.approx(sum(over) / 2, abs=1e-9)
        low, high = result["over_dense_interval_95"]
        assert low - 1e-9 <= result["over_dense"] <= high + 1e-9
        assert [tiny_tokenizer().decode(text) for text in tokens] == [sample["text"] for sample in result["samples"]]


def test_a_method_that_is_dense_draws_dense_text_and_one_that_is_not_its_own(found: Any) -> None:
    _, results, texts = found
    assert texts[NEVER] == texts["dense"] and texts["dense"][0] != texts["dense"][1]
    assert [x["first_divergence"] for x in results[NEVER]["samples"]] == [None, None]
    assert results[NEVER]["over_dense"] == 0 and results["dense"]["decode_reads"]["total"] == 1
    for label in (MAC, SHORT, BOTH):
        assert results[label]["decode_reads"]["keys"] < 0.5
        for sample, mine, theirs in zip(results[label]["samples"], texts[label], texts["dense"], strict=True):
            at = sample["first_divergence"]
            assert mine[:at] == theirs[:at] and mine[at] != theirs[at]
    assert results[SHORT]["over_dense"] > 0.1  # what sees little says what is unlikely
    assert sum(results[MAC]["samples"][0]["noted"]["reuse"]) > 0 and results[SHORT]["samples"][0]["noted"] == {}


def test_seeds_give_the_same_record_twice(model: Any, found: Any) -> None:
    _, results, texts = found
    some = ("dense", MAC)
    assert measured(task_of(model, [MAC])) == tuple({label: x[label] for label in some} for x in (results, texts))
    assert measured(task_of(model, [], seed=1))[1]["dense"] != texts["dense"]


def test_no_temperature_takes_the_likeliest_tokens(model: Any) -> None:
    task = task_of(model, [], temperature=0)
    _, texts = measured(task)
    for window, text in zip(task.windows, texts["dense"], strict=True):
        scores = logits(model, window, text)
        scores[:, EOS_ID] = -torch.inf
        assert scores.argmax(-1).tolist() == text
    _, cool = measured(task_of(model, [], temperature=1e-4))
    assert cool == texts


def test_an_interrupted_run_goes_on_to_the_same_record(model: Any, found: Any) -> None:
    kept: dict[str, Any] = {}

    def keep(name: str, part: Any) -> None:
        kept[name] = json.loads(json.dumps(part))
        if len(kept) == 3:
            raise KeyboardInterrupt

    task, results = task_of(model, [SHORT, BOTH]), found[1]
    with pytest.raises(KeyboardInterrupt):
        task.run(13, keep=keep)
    assert list(kept) == ["dense|0", "dense|1", f"{BOTH}|0"]
    fresh: list[str] = []
    again = task.run(13, done=kept, keep=lambda name, part: fresh.append(name))
    assert fresh == [f"{BOTH}|1"] and untimed(again) == {label: results[label] for label in ("dense", SHORT, BOTH)}


def test_repetition_and_divergence() -> None:
    gram = list(range(NGRAM))
    assert repeated([*gram, *gram]) == 1 / (2 * NGRAM) and repeated(gram) == 0 == repeated([5])
    assert repeated([1] * 20) == (20 - NGRAM) / 20
    assert first_divergence([1, 2, 3], [1, 2, 4]) == 2 and first_divergence([1], [1]) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 300}, "longest text has 216 tokens, a window takes 299"),
        ({"length": 1}, "length: expected at least 2 tokens, got 1"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"steps": 4096}, "context is 4096"),
        ({"temperature": -1.0}, "temperature: expected a finite number"),
        ({"temperature": float("nan")}, "temperature: expected a finite number"),
    ],
)
def test_what_cannot_be(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        task_of(model, [], **options)


def test_an_unknown_method(model: Any) -> None:
    with pytest.raises(UnknownName, match="quset"):
        task_of(model, ["quset"])
