"""The demo's document and how its answers are judged."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.adapters.transformers import Answer, Reader
from longreach.errors import InvalidInput
from longreach.evals.demo import ANSWER_TOKENS, DEPTHS, Demo
from longreach.evals.methods import pairings
from longreach.testing.tiny import tiny_model, tiny_tokenizer

LENGTH = 1400


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo(tiny_model("llama"), tiny_tokenizer(), LENGTH)


def text_of(demo: Demo) -> str:
    prompts = [demo.tokenizer.decode(demo.document + q, skip_special_tokens=True) for q in demo.questions]
    return prompts[0].partition("\n\nWhat is the special")[0]


def test_every_fact_is_in_the_text_at_its_depth_and_asked_for_after_it(demo: Demo) -> None:
    text = text_of(demo)
    assert len({fact.key for _, fact in demo.placed}) == len({fact.value for _, fact in demo.placed}) == len(DEPTHS)
    for (depth, fact), question in zip(demo.placed, demo.questions, strict=True):
        assert text.count(fact.statement) == 1 and text.count(fact.value) == 1
        assert abs(text.index(fact.statement) / len(text) - depth) < 0.2
        prompt = demo.tokenizer.decode(demo.document + question, skip_special_tokens=True)
        assert prompt == f"{text}\n\n{fact.question}"
        assert len(demo.document) + len(question) + ANSWER_TOKENS <= LENGTH
    assert demo.characters == len(text) and demo.tokens == len(text) + 1


def test_it_fills_the_length_it_was_given(demo: Demo) -> None:
    assert demo.tokens > 0.75 * LENGTH


def test_the_seed_decides_text_and_facts(demo: Demo) -> None:
    same = Demo(demo.model, demo.tokenizer, LENGTH)
    other = Demo(demo.model, demo.tokenizer, LENGTH, seed=1)
    assert same.document == demo.document and same.placed == demo.placed
    assert other.document != demo.document and other.placed != demo.placed


def test_an_answer_is_right_where_it_holds_the_value(demo: Demo) -> None:
    _, fact = demo.placed[0]
    for text, right in ((f" {fact.value}", True), (f"is {fact.value}.", True), (fact.value[:-1], False), ("", False)):
        tokens = demo.tokenizer(text, add_special_tokens=False).input_ids
        said = demo._said(0.1, fact, Answer(tokens=list(tokens)))
        assert said.right is right and said.answer == text.strip()


def test_times_and_reads_are_counted_per_method(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two methods; tests/cli/test_demo.py runs all."""
    few = ["streaming_llm", "oracle_top_k"]
    monkeypatch.setattr("longreach.evals.demo.pairings", lambda left_out: pairings(few, left_out))
    seen: list[tuple[str, int]] = []

    class Watched:
        def __init__(self, what: str, total: int):
            seen.append((what, total))

        def __enter__(self) -> Any:
            return lambda done: None

        def __exit__(self, *error: object) -> None: ...

    rows = list(demo.rows(Watched))
    reading = [total for what, total in seen if what.startswith("reading")]
    assert reading == [len(demo.document)] * 2  # once per prefill method, not per row
    assert demo.left_out == {}, "sessions make the plans that kascade and loki lack"
    assert len(rows) == sum(len(decodes) for _, decodes in pairings(few, left_out=demo.left_out)) and len(
        seen
    ) == 2 + len(rows)
    dense = rows[0]
    assert dense.decode_reads and dense.prefill_reads and dense.decode_reads.total == dense.prefill_reads.total == 1.0
    assert rows[1].decode_reads and 0.3 < rows[1].decode_reads.total < 0.31
    assert {row.read_seconds for row in rows[:-1]} == {dense.read_seconds}


def test_lengths_that_do_not_fit_are_refused(demo: Demo) -> None:
    with pytest.raises(InvalidInput, match="context is 4096 tokens"):
        Demo(demo.model, demo.tokenizer, 4097)
    with pytest.raises(InvalidInput, match="no room for 3 facts"):
        Demo(demo.model, demo.tokenizer, 500)


def test_each_method_is_warmed_up_before_its_questions(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step compiles kernels; its time is in no row, and its reads are in no report."""
    monkeypatch.setattr("longreach.evals.demo.pairings", lambda left_out: pairings(["streaming_llm"], left_out))
    events = list[tuple[str, str]]()
    for name in ("warm_up", "ask"):
        real = getattr(Reader, name)

        def watched(self: Reader, *args: Any, name: str = name, real: Any = real) -> Any:
            events.append((name, self.session.decode.name))
            found = real(self, *args)
            if name == "warm_up":
                assert not [layer for layer in self.session.report().layers if layer.phase == "decode"]
            return found

        monkeypatch.setattr(Reader, name, watched)
    rows = list(demo.rows())
    expected = [(name, row.decode) for row in rows for name in ("warm_up", *["ask"] * len(DEPTHS))]
    assert events == expected and {row.decode for row in rows} == {"dense", "streaming_llm"}
