"""Counting tokens: the tokenizer's own number, whatever the text and the tokenizer, at once and when remembered."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.adapters.transformers import model_path
from longreach.evals.prompting import MOST_KNOWN, SHORT, Counter, Maker, at_lengths, fitted
from longreach.tasks import haystack, registry
from longreach.testing.tiny import tiny_tokenizer

TEXTS = (
    "",
    "one",
    "a </s> b<s>",
    "\n\nTwo  lines.\n",
    "été 漢字 \u200b",
    "x" * (SHORT + 1),
    *haystack.paragraphs()[:5],
)


def mini() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path("mini"))


class Slow:
    """A tokenizer without a backend of the library tokenizers."""

    def __call__(self, text: str, **options: Any) -> Any:
        assert options == {"add_special_tokens": False, "verbose": False}
        return type("Encoding", (), {"input_ids": text.split(" ")})


@pytest.mark.parametrize("make", [tiny_tokenizer, mini, Slow])
def test_counts_are_the_tokenizers(make: Any) -> None:
    tokenizer = make()
    count = Counter(tokenizer)
    for _ in range(2):
        for text in TEXTS:
            assert count(text) == len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def test_what_the_backend_is_set_to_does_not_count() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert Counter(tokenizer)("abcdefgh") == 8


def test_memory_has_an_end() -> None:
    count = Counter(Slow())
    for number in range(MOST_KNOWN + 10):
        assert count(f"{number} b") == 2
    assert len(count._known) == MOST_KNOWN and count("x " * SHORT) == SHORT + 1


@pytest.mark.parametrize("name", ["niah_single_2", "cwe", "plan"])
def test_a_remembering_counter_changes_no_prompt(name: str) -> None:
    task, tokenizer = registry.task(name), mini()
    kept = Maker(at_lengths([task], [2500]), tokenizer, seed=1)
    for number in range(3):
        sample, prompt = fitted(task, tokenizer, 2500, 1, number, 3, count=lambda t: len(tokenizer.tokenize(t)))
        made = kept.make(name, number, 3)
        assert (made.sample, list(made.prompt), made.number) == (sample, prompt, number)
