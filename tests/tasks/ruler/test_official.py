"""RULER's own form of vt and fwe: the text that its generators write, letter by letter; the default is as it was."""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from random import Random

import pytest
from tests.tasks.counts import COUNTS, made, whole

from longreach.errors import UnknownName
from longreach.evals.prompting import PromptCutter, prompt_tokens
from longreach.tasks.registry import GROUPS, choose, task
from longreach.tasks.ruler.frequent_words import FrequentWords
from longreach.tasks.ruler.text import NOISE
from longreach.tasks.ruler.tracing import Tracing
from longreach.testing.tiny import tiny_tokenizer

# templates of scripts/data/synthetic/constants.py in NVIDIA/RULER: template, answer_prefix
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: "
    "Find all variables that are assigned the value {query} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {num_v} variables are assigned the value {query}, they are: "
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)


def pattern(template: str) -> str:
    """A regular expression that the whole of a text made by the template matches."""
    text = re.escape(template).replace(r"\{context\}", "(?P<context>(?s:.*))").replace(r"\{num_v\}", "5")
    first, *others = text.split(r"\{query\}")
    return "".join([first, r"(?P<query>\d{5})", "(?P=query)".join(others)]) if others else first


def test_variable_tracking() -> None:
    sample = made(task("vt_official"), 4000, count=COUNTS["mini"])
    example, own = whole(sample).split("\n\nMemorize", 1)
    example, _, answer = example.rpartition("  ")  # the beginning of the answer ends with a space, and one more follows
    shown, mine = (re.fullmatch(pattern(VT), text) for text in (f"{example} ", f"Memorize{own}"))
    assert shown and mine and shown["query"] != mine["query"]
    assert sample.begun.endswith("they are: ")
    for match, names, letters in ((shown, answer.split(), 3), (mine, list(sample.answers), 5)):
        lines = match["context"].split("\n")
        links = [line for line in lines if line != NOISE]
        want = [f"VAR {names[0]} = {match['query']}"]
        want += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
        assert links == want and all(len(name) == letters for name in names) and len(names) == 5
        assert lines[-1] == NOISE and not any(a != NOISE and b != NOISE for a, b in pairwise(lines))
    assert shown["context"].count(NOISE) == 12
    assert mine["context"].count(NOISE) > 80


@pytest.mark.parametrize("unit", COUNTS)
def test_the_example_has_as_many_lines_as_fit_500_tokens(unit: str) -> None:
    """And never fewer than the chain has links."""
    count = COUNTS[unit]
    sample = made(task("vt_official"), {"bytes": 9000}.get(unit, 3000), count=count)
    example = sample.context.split("\n\nMemorize", 1)[0].rpartition("  ")[0] + " "
    tokens, lines = count(example), example.count(NOISE)
    assert tokens <= 500 < tokens + 2 * count(NOISE) or lines == 5


@pytest.mark.parametrize("room", [300, 4000])
def test_frequent_words(room: int) -> None:
    sample = made(task("fwe_official"), room)
    match = re.fullmatch(pattern(FWE), whole(sample))
    assert match
    words = match["context"].split(" ")
    assert words.count("...") == max(map(words.count, words)) and "...." not in words
    assert [words.count(answer) for answer in sample.answers] == sample.facts["times"]


def test_what_a_model_reads_ends_with_the_space() -> None:
    tokenizer = tiny_tokenizer()
    for name in ("vt_official", "fwe_official"):
        sample = made(task(name), 9000, count=COUNTS["bytes"])
        ids = prompt_tokens(tokenizer, sample)
        assert tokenizer.decode(ids, skip_special_tokens=True) == whole(sample)
        cut = PromptCutter(tokenizer, 512)(sample)
        assert tokenizer.decode(list(cut.ids), skip_special_tokens=True) == whole(sample)


# sha256 of samples before there were forms
BEFORE = {
    ("vt", "words"): "50ce04060f34e394",
    ("vt", "mini"): "3889f06d4e409a83",
    ("fwe", "words"): "3ed0e18291ec8650",
    ("fwe", "mini"): "409e5411d5f223e3",
}


@pytest.mark.parametrize(("name", "unit"), BEFORE)
def test_the_default_form_is_as_it_was(name: str, unit: str) -> None:
    """So that its records stay valid."""
    one = task(name)
    samples = [one.sample(Random(seed), 2000, COUNTS[unit]) for seed in range(3)]
    told = repr([(s.context, s.question, s.begun, s.answers, s.facts, s.joint) for s in samples])
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == BEFORE[name, unit]
    assert one.source == "RULER (Hsieh et al., 2024, arXiv:2404.06654)"


def test_names_and_group() -> None:
    names = [one.name for one in choose("ruler_official")]
    assert names == [name if name not in ("vt", "fwe") else f"{name}_official" for name in GROUPS["ruler"]]
    assert [one.source for one in choose("vt_official,fwe_official")] == [
        "RULER (Hsieh et al., 2024, arXiv:2404.06654), in the form of its generators"
    ] * 2
    for kind in (Tracing, FrequentWords):
        with pytest.raises(UnknownName, match="unknown form 'mine'; known: longreach, official"):
            kind(form="mine")  # type: ignore[arg-type]
