"""LongBench's measures of answers (Bai et al., 2023, table 1). Each takes an answer and one expected text.

ROUGE is that of the package rouge-score, and similarity of code that of rapidfuzz, unrounded: scores differ a little
from those of the official script, which uses the packages rouge and fuzzywuzzy.
"""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unicodedata import category

from longreach.errors import Unsupported

ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER = re.compile(r"\d+")
PUNCTUATION = str.maketrans("", "", string.punctuation)
MARKS = "PSZ"  # punctuation, symbols and separators of any script, as Unicode has them
COMMENTS = ("`", "#", "//")  # a line with one of them is talk about code


def overlap(found: Sequence[str], expected: Sequence[str]) -> float:
    """F1 of two bags of tokens."""
    common = (Counter(found) & Counter(expected)).total()
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def qa_f1(answer: str, expected: str) -> float:
    """F1 of words, without case, punctuation and articles (SQuAD's)."""

    def words(text: str) -> list[str]:
        return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()

    return overlap(words(answer), words(expected))


def qa_f1_zh(answer: str, expected: str) -> float:
    """F1 of Chinese words, without punctuation."""

    def words(text: str) -> list[str]:
        bare = ("".join(c for c in w.lower() if category(c)[0] not in MARKS) for w in segmented(text))
        return [w for w in bare if w]

    return overlap(words(answer), words(expected))


def rouge_l(answer: str, expected: str) -> float:
    """F1 of the longest common subsequence of words (Lin, 2004), without case, unstemmed."""
    return _rouge(False).score(expected, answer)["rougeL"].fmeasure


def rouge_l_zh(answer: str, expected: str) -> float:
    """The same of Chinese words."""
    return _rouge(True).score(expected, answer)["rougeL"].fmeasure


def retrieval(answer: str, expected: str) -> float:
    """The share of the numbers in the answer that are the expected one ("Paragraph 12")."""
    wanted = NUMBER.findall(expected)[:1]
    found = NUMBER.findall(answer)
    return sum([n] == wanted for n in found) / len(found) if found else 0.0


def count(answer: str, expected: str) -> float:
    """The share of the numbers in the answer that are the expected one."""
    found = NUMBER.findall(answer)
    return sum(n == expected for n in found) / len(found) if found else 0.0


def classification(answer: str, expected: str, classes: Sequence[str]) -> float:
    """1 over the number of classes named in the answer where the expected one is; parts of its name do not count."""
    named = [c for c in classes if c in answer and (c == expected or c not in expected)]
    return 1 / len(named) if expected in named else 0.0


def code_similarity(answer: str, expected: str) -> float:
    """Similarity of the answer's first line of code and the expected one: 2 M / T, M characters in common order."""
    lines = answer.lstrip("\n").split("\n")
    line = next((each for each in lines if not any(mark in each for mark in COMMENTS)), "")
    return import_module("rapidfuzz.fuzz").ratio(line, expected) / 100


def first_line(answer: str) -> str:
    """What few-shot answers are judged by: the examples teach a model to go on with another one."""
    return answer.lstrip("\n").split("\n", 1)[0]


NEEDED = {  # metric -> (module, package that brings it)
    qa_f1_zh: (("jieba", "jieba"),),
    rouge_l: (("rouge_score", "rouge-score"),),
    rouge_l_zh: (("rouge_score", "rouge-score"), ("jieba", "jieba")),
    code_similarity: (("rapidfuzz", "rapidfuzz"),),
}


def check_packages(metric: Callable[..., float], what: str) -> None:
    """Raise Unsupported, saying what to install, where a metric's package is not there."""
    missing = [package for module, package in NEEDED.get(metric, ()) if find_spec(module) is None]
    if missing:
        raise Unsupported(
            f"{what} is scored with the package {' and '.join(missing)}, not installed here; "
            f"pip install 'longreach[longbench]'"
        )


def segmented(text: str) -> list[str]:
    """A Chinese text's words, by jieba."""
    jieba = import_module("jieba")
    jieba.setLogLevel(logging.WARNING)  # it reports the loading of its dictionary
    return jieba.lcut(text)


class _Segments:
    """rouge-score's tokenizer for Chinese: its own keeps Latin letters and digits only."""

    def tokenize(self, text: str) -> list[str]:
        return [word for word in segmented(text) if word.strip()]


@cache
def _rouge(chinese: bool) -> Any:
    scorer = import_module("rouge_score.rouge_scorer").RougeScorer
    return scorer(["rougeL"], tokenizer=_Segments() if chinese else None)
