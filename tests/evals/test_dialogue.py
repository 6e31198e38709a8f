"""Dialogues: what is asked can be found in the text, and numbers are those of the model itself."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
import torch

from longreach.adapters.transformers import load, model_path
from longreach.errors import InvalidInput
from longreach.evals.dialogue import Dialogue, script
from longreach.evals.methods import specs
from longreach.evals.prompting import Counter
from longreach.testing.tiny import tiny_model, tiny_tokenizer

MAC = "mac tau=0 window=64 band=8 min_context=0 rest_rows=None"
WHOLE, SHORT = "streaming_llm window=1.0", "streaming_llm window=40"


@pytest.fixture(scope="module")
def mini() -> Any:
    return load(model_path("mini"))


@pytest.fixture(scope="module")
def found(mini: Any) -> tuple[Dialogue, dict[str, Any]]:
    task = Dialogue(*mini, specs([SHORT]), length=250, questions=2, seed=1)
    return task, {label: parts[0] for label, parts in task.run(chunk=256).items()}


def test_a_script_asks_for_each_needle_once_with_its_value(mini: Any) -> None:
    _, tokenizer = mini
    one = script(tokenizer, 500, 6, Random("a"), Counter(tokenizer))
    text, fed = (tokenizer.decode(x, skip_special_tokens=True) for x in (one.prompt, one.fed))
    assert len(one.prompt) <= 500 and len(one.answers) == 6
    values = [tokenizer.decode(one.fed[a:b]).strip() for a, b in one.answers]
    assert len(set(values)) == 6
    turns = fed.split("What is the special magic number for ")[1:]
    for turn, value in zip(turns, values, strict=True):
        key = turn.partition(" mentioned")[0]
        assert f"magic numbers for {key} is: {value}." in text and turn.rstrip().endswith(f"is {value}")
    assert script(tokenizer, 500, 6, Random("a"), Counter(tokenizer)) == one
    assert script(tokenizer, 500, 6, Random("b"), Counter(tokenizer)) != one


def test_numbers_are_those_of_one_pass_of_the_model(mini: Any, found: tuple[Dialogue, dict[str, Any]]) -> None:
    model, _ = mini
    task, parts = found
    (one,) = task.scripts
    ids = torch.tensor([[*one.prompt, *one.fed]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(one.prompt) - 1 : -1].double()
    fed = torch.tensor(one.fed)
    nll = -logits.log_softmax(-1).gather(1, fed[:, None])[:, 0]
    likeliest = logits.argmax(-1) == fed
    part = parts["dense"]
    assert part["right"] == [bool(likeliest[a:b].all()) for a, b in one.answers]
    assert part["nll"] == pytest.approx(float(nll[1:].mean()), rel=1e-4)
    answers = float(torch.cat([nll[a:b] for a, b in one.answers]).mean())
    assert part["nll_answers"] == pytest.approx(answers, rel=1e-3)
    assert part["kl"] < 1e-6 and part["agree"] == 1.0 and len(part["kl_by_question"]) == 2
    assert sum(part["right"]) == 2  # or wrong answers would mean nothing


def test_what_reads_less_is_further_off(found: tuple[Dialogue, dict[str, Any]]) -> None:
    _, parts = found
    dense, short = parts["dense"], parts[SHORT]
    assert short["kl"] > 1e-4 and short["bytes"][0] < dense["bytes"][0]
    assert sum(short["right"]) < 2 and short["nll_answers"] > dense["nll_answers"]
    assert dense["noted"] == {} == short["noted"]


def test_a_method_says_what_it_reused() -> None:
    task = Dialogue(tiny_model("llama"), tiny_tokenizer(), specs([MAC, WHOLE]), length=250, questions=1, seed=1)
    dense, reused, whole = (part for (part,) in task.run(chunk=256).values())
    assert whole["kl"] < 1e-6 and whole["agree"] == 1.0 and whole["bytes"][0] == dense["bytes"][0]
    assert reused["kl"] > 1e-4 and reused["bytes"][0] < dense["bytes"][0] and dense["noted"] == {}
    assert sum(reused["noted"]["reuse"]) > 0 and len(reused["noted"]["skipped"]) == 2


def test_answers_may_be_its_own(mini: Any, found: tuple[Dialogue, dict[str, Any]]) -> None:
    """It goes on from what it says, and is compared with dense attention until it says something else."""
    task, fed = found
    own = Dialogue(*mini, specs([SHORT]), length=250, questions=2, seed=1, own=True)
    assert own.scripts == task.scripts
    parts = {label: parts[0] for label, parts in own.run(chunk=256).items()}
    same = ("nll", "nll_answers", "kl", "agree")  # right throughout, so the same words
    assert parts["dense"]["right"] == fed["dense"]["right"] == [True] * 2
    assert [parts["dense"][x] for x in same] == pytest.approx([fed["dense"][x] for x in same], rel=1e-6, abs=1e-9)
    lost, then = parts[SHORT], fed[SHORT]
    assert lost["right"][0] is False is then["right"][0] and lost["kl"] != then["kl"]
    assert lost["kl_by_question"][0] is not None and lost["kl_by_question"][1:] == [None]
    assert lost["nll"] != then["nll"] and 0 < lost["agree"] <= 1


def test_samples_that_were_measured_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Dialogue(tiny_model("llama"), tiny_tokenizer(), specs([]), length=300, questions=1, samples=2)
    assert task.scripts[0] != task.scripts[1]
    kept: dict[str, Any] = {}
    whole = task.run(chunk=256, keep=kept.__setitem__)
    assert list(kept) == ["dialogue 0", "dialogue 1"] and json.loads(json.dumps(kept)) == kept
    monkeypatch.setattr(Dialogue, "_sample", None)
    assert task.run(chunk=256, done=kept) == whole


def test_what_cannot_be(mini: Any) -> None:
    with pytest.raises(InvalidInput, match="questions: expected at least 1"):
        Dialogue(*mini, specs([]), questions=0)
    with pytest.raises(InvalidInput, match="dialogue"):
        Dialogue(*mini, specs([]), length=200, questions=50)
    with pytest.raises(InvalidInput, match="context is 16384"):
        Dialogue(*mini, specs([]), length=16300, questions=20)
