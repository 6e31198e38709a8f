"""What longreach.generate cannot do as asked is an error that names it, never other tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from longreach import attach, generate
from longreach.adapters.transformers import unapplied
from longreach.errors import InvalidInput, UnknownName, Unsupported
from tests.adapters.transformers.reference import model_of, prompt

APPLIED: dict[str, Any] = {  # by transformers
    "repetition_penalty": 1.05,
    "encoder_repetition_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [231],
    "begin_suppress_tokens": [231],
    "bad_words_ids": [[231]],
    "sequence_bias": {(231,): -10.0},
    "forced_eos_token_id": 7,
    "min_new_tokens": 3,
}
REFUSED: dict[str, Any] = {"guidance_scale": 1.5, "stop_strings": ["a"], "num_beams": 3}
SHAPING = APPLIED | REFUSED


@pytest.mark.parametrize("name", APPLIED)
def test_settings_of_the_model_are_applied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, free = model_of("llama"), model_of("llama").generate(prompt(), max_new_tokens=8, do_sample=False)
    first, second = (int(token) for token in free[0, 40:42])
    unwanted: dict[str, Any] = {
        "suppress_tokens": [first],
        "begin_suppress_tokens": [first],
        "bad_words_ids": [[second]],
        "sequence_bias": {(first,): -10.0},
    }
    value = unwanted.get(name, APPLIED[name])
    monkeypatch.setattr(model.generation_config, name, value, raising=False)
    want = model.generate(prompt(), max_new_tokens=8, do_sample=False)
    assert torch.equal(generate(model, prompt(), max_new_tokens=8).sequences, want)
    assert torch.equal(want, free) == (name in ("min_new_tokens", "no_repeat_ngram_size"))  # no end, no repetition


@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_the_model_that_the_loop_lacks_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    monkeypatch.setattr(model.generation_config, name, REFUSED[name], raising=False)
    with pytest.raises(Unsupported, match=name):
        generate(model, prompt(), max_new_tokens=4)


def test_settings_that_change_nothing_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    want = generate(model, prompt(), max_new_tokens=4).sequences
    for name, value in (("repetition_penalty", 1.0), ("no_repeat_ngram_size", 0), ("min_length", 0), ("min_p", 0.3)):
        monkeypatch.setattr(model.generation_config, name, value, raising=False)
    assert torch.equal(generate(model, prompt(), max_new_tokens=4).sequences, want)  # min_p is for sampling


def test_what_answers_are_made_without_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    assert unapplied(model, sampled=False) == unapplied(model, sampled=True) == {}
    for name, value in {**SHAPING, "do_sample": True, "top_p": 0.9, "min_p": 0.1, "min_length": 0}.items():
        monkeypatch.setattr(model.generation_config, name, value, raising=False)
    assert set(unapplied(model, sampled=False)) == {*SHAPING, "do_sample"}
    assert set(unapplied(model, sampled=True, applied=["stop_strings"])) == {*SHAPING, "top_p", "min_p"} - {
        "stop_strings"
    }
    json.dumps(unapplied(model, sampled=True))


@pytest.mark.parametrize(("token", "told"), [(-1, "-1 to"), (10**6, "to 1000000")])
def test_tokens_the_model_does_not_have(token: int, told: str) -> None:
    """On a GPU they would end the process's use of it."""
    ids = prompt()
    ids[0, 3] = token
    with pytest.raises(InvalidInput, match=rf"input_ids: expected tokens in \[0, 264\), got .*{told}"):
        generate(model_of("llama"), ids, max_new_tokens=2)


@pytest.mark.parametrize("value", [-1, 2, 0.5, torch.nan])
def test_masks_of_other_values_than_0_and_1(value: float) -> None:
    mask = torch.ones(prompt().shape)
    mask[0, 3] = value
    with pytest.raises(InvalidInput, match="attention_mask: expected 0 and 1 only"):
        generate(model_of("llama"), prompt(), mask, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eos_token_id": 2.0}, "eos_token_id: expected a token"),
        ({"eos_token_id": torch.tensor(5)}, "eos_token_id: expected a token"),
        ({"do_sample": True, "temperature": float("inf")}, "temperature: expected a finite number > 0, got inf"),
        ({"graph": "no"}, "graph: expected True, False, None or 'piecewise', got 'no'"),
        ({"do_sample": "no"}, "do_sample: expected True or False, got 'no'"),
    ],
    ids=str,
)
def test_options_of_another_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        generate(model_of("llama"), prompt(), max_new_tokens=2, **options)


def test_a_closed_session_says_so() -> None:
    with attach(model_of("llama")) as session:
        generate(session, prompt(), max_new_tokens=1)
    with pytest.raises(InvalidInput, match=r"the session is closed; attach to the model again"):
        generate(session, prompt(), max_new_tokens=1)


def test_an_unknown_option_is_an_error_that_lists_the_known_ones() -> None:
    model = model_of("llama")
    with pytest.raises(UnknownName, match=r"num_beams.*known: input_ids.*temperature.*repetition_penalty.*decode"):
        generate(model, prompt(), max_new_tokens=2, num_beams=3)
    with attach(model) as session, pytest.raises(UnknownName, match="num_beams"):
        generate(session, prompt(), max_new_tokens=2, num_beams=3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the step is captured")
def test_fusion_that_nothing_would_use_is_refused_and_what_was_used_is_told() -> None:
    with pytest.raises(
        Unsupported, match=r"compile='compile' needs a captured step, and this one is not.*leave compile out"
    ):
        generate(model_of("llama"), prompt(), max_new_tokens=2, compile="compile")
    assert generate(model_of("llama"), prompt(), max_new_tokens=2).compile == "none"
