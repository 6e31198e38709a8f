"""Counting tokens: the tokenizer's own number, whatever the text and the tokenizer, at once and when remembered."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.adapters.transformers import model_path
from longreach.errors import InvalidInput
from longreach.evals.prompting import MOST_KNOWN, SHORT, Counter, Maker, PromptCutter, at_lengths, fitted
from longreach.tasks import haystack, registry
from longreach.tasks.base import Sample
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


@pytest.mark.parametrize("name", registry.GROUPS["all"])
def test_a_cut_prompt_has_the_characters_of_the_whole_one(name: str) -> None:
    tokenizer, length = mini(), 1500
    (kept,) = at_lengths([registry.task(name)], [length]).values()
    cut = Maker({name: kept}, tokenizer, 0, chunk_tokens=200)
    made, again = cut.make(name, 0, 2), cut.make(name, 0, 2)
    assert made == again and len(made.prompt) + kept.task.max_new_tokens <= length
    sample = made.sample
    text = f"{sample.context}\n\n{sample.question} {sample.begun}"
    assert tokenizer.decode(list(made.prompt), skip_special_tokens=True) == text
    head = tokenizer.decode(list(made.prompt[: made.chunks[0][0]]), skip_special_tokens=True)
    assert head.rstrip() == sample.context[: sample.instructions] and made.prompt[0] == tokenizer.bos_token_id
    assert len(made.chunks) > 1 and all(0 < stop - start <= 200 for start, stop in made.chunks)
    assert all(a[1] == b[0] for a, b in zip(made.chunks, made.chunks[1:]))
    tail = tokenizer.decode(list(made.prompt[made.chunks[-1][1] :]))
    assert tail == f"\n\n{sample.question} {sample.begun}"
    assert made.to_json()["chunks"] == [list(chunk) for chunk in made.chunks]
    if name.startswith("qa"):  # short documents stay whole
        ends = [tokenizer.decode(list(made.prompt[:stop])) for _, stop in made.chunks]
        assert all(end.endswith("\n\n") for end in ends[:-1])


def test_a_cut_prompt_in_a_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<u>{{ messages[0].content }}</u><a>"
    sample = Sample("Read. \n\nOne.\n\nTwo.", "Which?", "It is", ("a",), {}, instructions=5)
    parts = PromptCutter(tokenizer, 8)(sample)
    assert tokenizer.decode(list(parts.ids)) == "<u>Read. \n\nOne.\n\nTwo.\n\nWhich?</u><a>It is"
    assert [tokenizer.decode(list(parts.ids[a:b])) for a, b in parts.chunks] == ["One.\n\n", "Two."]
    plain = PromptCutter(tokenizer, 8)(sample, in_chat=False)
    assert tokenizer.decode(list(plain.ids), skip_special_tokens=True) == "Read. \n\nOne.\n\nTwo.\n\nWhich? It is"
    tokenizer.chat_template = None
    with pytest.raises(InvalidInput, match="text contains its question"):
        PromptCutter(tokenizer, 8)(Sample("One.", "", "", ()))
