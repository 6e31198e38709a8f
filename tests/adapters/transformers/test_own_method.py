"""Methods that users write, outside the registry: they run, and what is wrong with them is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from longreach import attach, compare, generate
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod, Outcome
from longreach.ops import Span, Spans, absolute, relative
from longreach.testing.tiny import random_tokens, tiny_tokenizer
from tests.adapters.transformers.reference import model_of

ALL = Spans((Span(absolute(0), relative(1)),))


@dataclass(frozen=True)
class Own(AttentionMethod):
    gives: str = "an outcome"

    name = "own"
    phases = ("decode",)

    def run(self, call: Any, state: Any) -> Any:
        partial = call.attend(ALL)
        return {"an outcome": Outcome(partial), "a partial": partial, "nothing": None}[self.gives]


@dataclass(frozen=True)
class WithoutPhases(AttentionMethod):
    name = "own"

    def run(self, call: Any, state: Any) -> Any:
        raise AssertionError


def test_an_instance_runs_and_is_counted() -> None:
    model, tokens = model_of("llama"), random_tokens(1, 30)
    want = model.generate(tokens, max_new_tokens=5, do_sample=False)
    with attach(model, decode=Own()) as session:
        assert model.generate(tokens, max_new_tokens=5, do_sample=False).tolist() == want.tolist()
        assert session.report().fraction("decode") == 1
        assert {x.method for x in session.report().layers if x.phase == "decode"} == {"own"}


@pytest.mark.parametrize("gives, found", [("a partial", "Partial"), ("nothing", "NoneType")])
def test_run_must_return_an_outcome(gives: str, found: str) -> None:
    with pytest.raises(InvalidInput, match=rf"own: run must return an Outcome, .* got {found}"):
        generate(model_of("llama"), random_tokens(1, 30), max_new_tokens=3, decode=Own(gives))


def test_what_it_lacks_and_where_it_must_be_registered() -> None:
    model = model_of("llama")
    with pytest.raises(InvalidInput, match=r'WithoutPhases has no phases; .* phases = \("decode",\)'):
        attach(model, decode=WithoutPhases())
    with pytest.raises(InvalidInput, match=r"the class Own, which is no configured method; write Own\(\)$"):
        attach(model, decode=Own)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"methods: expected text such as 'quest k=0.2', got Own"):
        compare(model, tiny_tokenizer(), "a text of some words", methods=[Own()])  # type: ignore[list-item]
