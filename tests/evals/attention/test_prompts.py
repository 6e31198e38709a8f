"""Where needles, answers and rows are, whatever the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from longreach.adapters.transformers import model_path
from longreach.evals.attention.prompts import TASKS, make
from longreach.evals.prompting import fitted
from longreach.tasks.registry import task
from longreach.testing.tiny import tiny_tokenizer


@pytest.fixture(scope="module", params=["bytes", "chat", "words"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "words":
        return AutoTokenizer.from_pretrained(model_path("mini"))
    return tiny_tokenizer(chat=request.param == "chat")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("number", [0, 3])
def test_places(tokenizer: Any, name: str, number: int) -> None:
    prompt = make(name, tokenizer, 1301, 0, number, 4, 9)
    value = tokenizer.decode(prompt.answer).strip()
    assert value.isdigit() and len(value) == 7
    assert tokenizer.decode([*prompt.tokens, *prompt.answer]).endswith(f"mentioned in the provided text is {value}")
    start, stop = prompt.needle
    needle = tokenizer.decode(prompt.tokens[start:stop])
    assert needle.strip() == f"One of the special magic numbers for {prompt.facts['keys'][0]} is: {value}."
    assert set(prompt.answer) <= set(prompt.tokens[start:stop])
    question = len(tokenizer(tokenizer.decode(prompt.tokens).rpartition("What is the special magic")[0],
                             add_special_tokens=False).input_ids)  # fmt: skip
    assert len(prompt.text) == 9 == len(set(prompt.text)) and list(prompt.text) == sorted(prompt.text)
    assert 0.75 * question - 2 <= prompt.text[0] and prompt.text[-1] < question + 1
    assert list(prompt.rows) == [len(prompt.tokens) - 1 + i for i in range(len(prompt.answer))]
    assert len(prompt.tokens) + len(prompt.answer) <= 1301


def test_the_prompt_is_the_one_that_eval_asks(tokenizer: Any) -> None:
    prompt = make(TASKS[1], tokenizer, 1301, 5, 2, 4, 3)
    sample, tokens = fitted(task(TASKS[1]), tokenizer, 1301, 5, 2, 4)
    spaced = len(prompt.tokens) - len(tokens)  # a tokenizer may make a token of the space before the answer
    assert list(prompt.tokens[: len(tokens)]) == tokens and spaced in (0, 1) and dict(sample.facts) == prompt.facts


def test_rows_are_drawn_anew_for_each_sample_and_seed() -> None:
    tokenizer = tiny_tokenizer()
    drawn = [make(TASKS[0], tokenizer, 1301, seed, number, 2, 9).text for seed in (0, 1) for number in (0, 1)]
    assert len(set(drawn)) == 4 and drawn[0] == make(TASKS[0], tokenizer, 1301, 0, 0, 2, 9).text
