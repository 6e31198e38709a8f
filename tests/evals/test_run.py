"""Questions about one document."""

from __future__ import annotations

from typing import Any

import pytest

from longreach import attach
from longreach.errors import InvalidInput
from longreach.evals.run import Questions
from longreach.testing.tiny import tiny_model, tiny_tokenizer

DOCUMENT = "The code for the barn is 4815162. " * 4


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", eos_token_id=258)


def answers(model: Any, *questions: str, decode: str = "dense", cut_short: bool = False) -> list[str]:
    task = Questions(model, tiny_tokenizer(), DOCUMENT, questions, max_new_tokens=10)
    with attach(model, decode=decode, cache=task.cache) as session:
        reader = task.read(session)
        for number in range(len(questions)):
            if cut_short:
                started = task.ask(reader, number)
                next(started)
                started.close()
            pieces = list(task.ask(reader, number))
            assert "".join(pieces).rstrip() == task.answered[-1].answer
    return [a.answer for a in task.answered]


def test_a_question_is_answered_alike_alone_and_after_others(model: Any) -> None:
    together = answers(model, "Who?", "What is the code?", "Who?")
    assert together == [answers(model, q)[0] for q in ("Who?", "What is the code?", "Who?")]
    assert together[0] == together[2] != together[1]


def test_an_answer_cut_short_leaves_the_document_as_it_was(model: Any) -> None:
    assert answers(model, "Who?", "What?", cut_short=True) == answers(model, "Who?", "What?")


def test_the_method_decides_the_answer(model: Any) -> None:
    assert answers(model, "Who?", decode="streaming_llm") != answers(model, "Who?")


def test_the_length_is_checked_to_the_token(model: Any) -> None:
    tokenizer, empty = tiny_tokenizer(), len("\n\nQuestion: Who?\nAnswer:") + 1
    fits = "x" * (4096 - 10 - empty)
    Questions(model, tokenizer, fits, ["Who?"], max_new_tokens=10)
    with pytest.raises(InvalidInput, match="shorten the document by 1 tokens"):
        Questions(model, tokenizer, fits + "x", ["Who?"], max_new_tokens=10)
    with pytest.raises(InvalidInput, match="shorten the document by 1 tokens"):  # the longest question counts
        Questions(model, tokenizer, fits, ["Who?", "What?"], max_new_tokens=10)


@pytest.mark.parametrize("document, questions", [(" \n", ["Who?"]), (DOCUMENT, []), (DOCUMENT, ["Who?", " "])])
def test_empty_documents_and_questions_are_refused(model: Any, document: str, questions: list[str]) -> None:
    with pytest.raises(InvalidInput, match="empty"):
        Questions(model, tiny_tokenizer(), document, questions)
