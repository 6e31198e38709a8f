"""Decode methods that keep state of all tokens observe every one of them, or are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import longreach
from longreach import attach
from longreach.adapters.transformers import Answer, Reader
from longreach.cache import StatelessOnTruncate
from longreach.errors import InvalidInput, UnknownName
from longreach.methods.base import AttentionMethod, Outcome, attend_densely
from longreach.methods.call import LayerCall
from longreach.testing.tiny import random_tokens, tiny_model

DOCUMENT = random_tokens(1, 20)[0].tolist()
QUESTION = random_tokens(1, 5, seed=1)[0].tolist()


class Noted(StatelessOnTruncate):
    """Positions noted, by slot."""

    def __init__(self, slots: int):
        self.seen: list[list[int]] = [[] for _ in range(slots)]

    def note(self, call: LayerCall) -> None:
        for seq, pos in zip(call.rows.seq.tolist(), call.rows.pos.tolist(), strict=True):
            self.seen[int(call.slots[seq])].append(pos)

    def reset(self, slots: Tensor) -> None:
        for slot in slots.tolist():
            self.seen[slot] = []

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            self.seen[slot] = [p for p in self.seen[slot] if p < length]


@dataclass(frozen=True)
class Watchful(AttentionMethod):
    """Decodes densely, and only where it has noted each token once and in order."""

    number: int = 0

    name = "watchful"
    phases = ("decode",)
    keeps = "sequences"
    observes_prompt = True

    def new_state(self, call: LayerCall, slots: int) -> Noted:
        return Noted(slots)

    def observe_prompt(self, call: LayerCall, state: Any) -> None:
        state.note(call)

    def run(self, call: LayerCall, state: Any) -> Outcome:
        state.note(call)
        for seq, pos in zip(call.rows.seq.tolist(), call.rows.pos.tolist(), strict=True):
            assert state.seen[int(call.slots[seq])] == list(range(pos + 1))
        return attend_densely(call)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def ask(reader: Reader) -> list[int]:
    return list(reader.ask(QUESTION, 6, (), Answer()))


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 7}])
def test_prompts_are_observed_in_generate(model: Any, options: dict[str, Any]) -> None:
    tokens = random_tokens(2, 17)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    plain = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
    with attach(model, decode=Watchful()) as session:
        found = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, **options)
        assert torch.equal(found, plain)
        assert {layer.method for layer in session.report().layers if layer.phase == "decode"} == {"watchful"}
        again = longreach.generate(session, tokens, attention_mask=mask, max_new_tokens=5)
        assert torch.equal(again.sequences, plain)


def test_methods_to_come_observe_too(model: Any) -> None:
    with attach(model) as session:
        session.prepare(Watchful(1), Watchful(2))
        reader = Reader(session, 6)
        reader.read(DOCUMENT)
        want = ask(reader)
        for method in (Watchful(1), Watchful(2), Watchful(1)):  # each forgets its answer, the others' it never saw
            session.switch(method)
            assert ask(reader) == want


def test_methods_to_come_may_be_named(model: Any) -> None:
    with attach(model) as session:
        session.prepare("quest", "streaming_llm", longreach.Quest(k=7))
        assert session.observers == (longreach.Quest(), longreach.Quest(k=7))
        for wrong, message in (("quests", "unknown decode method 'quests'"), ("snapkv", "unknown decode method")):
            with pytest.raises(UnknownName, match=message):
                session.prepare("mac", wrong)
        assert session.observers == (longreach.Quest(), longreach.Quest(k=7))


def test_a_switch_back_needs_no_prompt_again(model: Any) -> None:
    """Methods go on observing what is read while another one decodes."""
    with attach(model, decode=Watchful()) as session:
        session.switch("dense")
        reader = Reader(session)
        reader.read(DOCUMENT)
        session.switch(Watchful())
        assert len(ask(reader)) == 6


def test_a_method_that_missed_tokens_is_refused(model: Any) -> None:
    with attach(model) as session:
        reader = Reader(session)
        reader.read(DOCUMENT)
        session.switch(Watchful())
        with pytest.raises(
            InvalidInput,
            match=r"watchful decodes .* holds 25 tokens of which it observed the first 0 only; .*session\.prepare",
        ):
            ask(reader)
        reader.cache.empty()
        reader.read(DOCUMENT)  # the session observes with it now
        assert len(ask(reader)) == 6


@torch.no_grad()
def test_what_another_method_decoded_was_not_observed(model: Any) -> None:
    tokens = torch.tensor([DOCUMENT])
    with attach(model, decode=Watchful()) as session:
        cache = session.new_cache()
        model(tokens, past_key_values=cache)
        model(tokens[:, :1], past_key_values=cache)
        session.switch("dense")
        model(tokens[:, 1:2], past_key_values=cache)
        session.switch(Watchful())
        with pytest.raises(InvalidInput, match="holds 22 tokens of which it observed the first 21 only"):
            model(tokens[:, 2:3], past_key_values=cache)
        cache.crop(-1)
        model(tokens[:, 1:2], past_key_values=cache)  # forgotten and decoded anew
        cache.crop(-5)
        session.prepare()
        model(tokens[:, :4], past_key_values=cache)
        model(tokens[:, 1:2], past_key_values=cache)
