"""A text that is too long loses its middle; question and answer's beginning stay."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from longreach.errors import InvalidInput
from longreach.evals.prompting import fitted
from longreach.tasks.base import Sample
from longreach.tasks.longbench.base import Fixed, middle_out
from longreach.testing.tiny import tiny_tokenizer


def exact(answer: str, expected: Sequence[str]) -> float:
    return float(answer in expected)


def task(*contexts: str) -> Fixed:
    samples = [Sample(c, "What is it?", "Answer:", ("yes",), {"id": str(n)}) for n, c in enumerate(contexts)]
    return Fixed("longbench_x", "a test", 8, tuple(samples), exact)


def words(text: str) -> int:
    return len(text.split())


def cut_words(text: str, keep: int) -> str:
    each = text.split()
    return " ".join(each[: keep // 2] + each[len(each) - keep // 2 :])


LONG = " ".join(f"w{n}" for n in range(100))


def test_what_fits_stays_as_it_is() -> None:
    made = task(LONG)
    fitting = made.fit(made.fixed[0], 104, words, cut_words)
    assert fitting.context == LONG and fitting.facts == {"id": "0", "kept": 1.0}


@pytest.mark.parametrize("room", [103, 54, 20])
def test_the_middle_goes(room: int) -> None:
    made = task(LONG)
    fitting = made.fit(made.fixed[0], room, words, cut_words)
    left = fitting.context.split()
    assert left == LONG.split()[: len(left) // 2] + LONG.split()[-(len(left) // 2) :]
    assert room - 5 <= len(left) + 4 <= room  # 4 words of question and answer
    assert fitting.facts["kept"] == pytest.approx(len(left) / 100, abs=0.011)
    assert (fitting.question, fitting.begun) == ("What is it?", "Answer:")


def test_a_cut_that_takes_more_than_was_asked_is_tried_again() -> None:
    made = task(LONG)
    fitting = made.fit(made.fixed[0], 60, words, lambda text, keep: cut_words(text, keep + 4))
    assert 50 <= words(fitting.context) <= 56


@pytest.mark.parametrize("room", [5, 4, 1, 0])
def test_no_room_is_an_error_that_names_the_sample(room: int) -> None:
    made = task(LONG)
    with pytest.raises(InvalidInput, match=rf"longbench_x, sample 0: {room} tokens.*--length"):
        made.fit(made.fixed[0], room, words, cut_words)


@pytest.mark.parametrize("room", [120, 40])
def test_it_makes_samples_like_any_other_task(room: int) -> None:
    made, seen = task(LONG, "short"), set()
    for seed in range(8):
        sample = made.sample(Random(seed), room, len)
        assert len(f"{sample.context}\n\n{sample.question} {sample.begun}") <= room
        assert sample.context[:2] in ("w0", "sh") and sample.context[-2:] in ("99", "rt")
        assert sample == made.sample(Random(seed), room, len)
        seen.add(sample.facts["id"])
    assert seen == {"0", "1"}


def test_prompts_hold_both_ends_of_its_texts() -> None:
    made, tokenizer = task(LONG, "short"), tiny_tokenizer()
    texts = [fitted(made, tokenizer, 128, 0, number, 2) for number in range(2)]
    assert len(texts[0][1]) in range(110, 121)
    written = [tokenizer.decode(prompt, skip_special_tokens=True) for _, prompt in texts]
    assert written[0].startswith("w0 w1 ") and written[0].endswith("w98 w99\n\nWhat is it? Answer:")
    assert written[1] == "short\n\nWhat is it? Answer:"


def test_both_ends_of_a_text_are_kept() -> None:
    assert middle_out("abcdef", 4) == "abef"
    assert middle_out("abcdef", 3) == "af"
    assert middle_out("abcdef", 0) == ""
    assert middle_out("abcdef", 6) == "abcdef"
