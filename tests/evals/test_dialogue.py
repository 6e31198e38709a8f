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

MAC = "mac tau=0 window=64 band=8 min_context=0 rest_rows=None"
NEVER = "mac band=100000 min_context=0 rest_rows=None"


@pytest.fixture(scope="module")
def mini() -> Any:
    return load(model_path("mini"))


@pytest.fixture(scope="module")
def found(mini: Any) -> tuple[Dialogue, dict[str, Any]]:
    task = Dialogue(*mini, specs([NEVER, MAC, "streaming_llm window=40"]), length=250, questions=2, seed=1)
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
    for label in ("dense", NEVER):
        part = parts[label]
        assert part["right"] == [bool(likeliest[a:b].all()) for a, b in one.answers]
        assert part["nll"] == pytest.approx(float(nll[1:].mean()), rel=1e-4)
        answers = float(torch.cat([nll[a:b] for a, b in one.answers]).mean())
        assert part["nll_answers"] == pytest.approx(answers, rel=1e-3)
        assert part["kl"] < 1e-6 and part["agree"] == 1.0 and len(part["kl_by_question"]) == 2
    assert sum(parts["dense"]["right"]) == 2  # or wrong answers would mean nothing


def test_what_reads_less_is_further_off_and_says_what_it_reused(found: tuple[Dialogue, dict[str, Any]]) -> None:
    _, parts = found
    reused, short = parts[MAC], parts["streaming_llm window=40"]
    assert reused["kl"] > 1e-4 and reused["bytes"][0] < parts["dense"]["bytes"][0] == parts[NEVER]["bytes"][0]
    assert sum(reused["noted"]["reuse"]) > 0 and sum(parts[NEVER]["noted"]["reuse"]) == 0
    assert len(reused["noted"]["skipped"]) == 12 and parts["dense"]["noted"] == {} == short["noted"]
    assert sum(short["right"]) < 2 and short["nll_answers"] > parts["dense"]["nll_answers"]


def test_answers_may_be_its_own(mini: Any, found: tuple[Dialogue, dict[str, Any]]) -> None:
    """It goes on from what it says, and is compared with dense attention until it says something else."""
    task, fed = found
    short = "streaming_llm window=40"
    own = Dialogue(*mini, specs([short]), length=250, questions=2, seed=1, own=True)
    assert own.scripts == task.scripts
    parts = {label: parts[0] for label, parts in own.run(chunk=256).items()}
    same = ("nll", "nll_answers", "kl", "agree")  # right throughout, so the same words
    assert parts["dense"]["right"] == fed["dense"]["right"] == [True] * 2
    assert [parts["dense"][x] for x in same] == pytest.approx([fed["dense"][x] for x in same], rel=1e-6, abs=1e-9)
    lost, then = parts[short], fed[short]
    assert lost["right"][0] is False is then["right"][0] and lost["kl"] != then["kl"]
    assert lost["kl_by_question"][0] is not None and lost["kl_by_question"][1:] == [None]
    assert lost["nll"] != then["nll"] and 0 < lost["agree"] <= 1


def test_samples_that_were_measured_are_taken_over(mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Dialogue(*mini, specs([]), length=200, questions=1, samples=2)
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
