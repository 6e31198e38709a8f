"""LongBench v2 (Bai et al., 2024): questions with four choices about long texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from longreach.errors import InvalidInput
from longreach.tasks.base import Sample
from longreach.tasks.longbench.base import Fixed
from longreach.tasks.longbench.files import Entry, check_fields, entries
from longreach.tasks.sources import of_file

SOURCE = "LongBench v2 (Bai et al., 2024, arXiv:2412.15204)"
LETTERS = "ABCD"
ABOUT = ("domain", "sub_domain", "difficulty", "length")
FIELDS = dict.fromkeys(("_id", *ABOUT, "question", *(f"choice_{x}" for x in LETTERS), "answer", "context"), str)
CHOSEN = re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])")
QUESTION = """What is the correct answer to this question: {question}
Choices:
(A) {choice_A}
(B) {choice_B}
(C) {choice_C}
(D) {choice_D}

Answer in this form: "The correct answer is (insert the letter here)"."""


def read(path: Path) -> list[Fixed]:
    """The one task of a file, a JSON list or JSONL. Raises InvalidInput, naming file, entry and field."""
    samples = tuple(_sample(entry) for entry in entries(path))
    return [Fixed("longbench_v2", of_file(SOURCE, path), 128, samples, accuracy, by=("difficulty", "length"))]


def _sample(entry: Entry) -> Sample:
    check_fields(entry, FIELDS)
    place, values = entry
    if values["answer"] not in tuple(LETTERS):
        raise InvalidInput(f"{place}: the field 'answer' should be A, B, C or D, got {values['answer'][:40]!r}")
    text = f"Read the text below and answer the question after it.\n\n<text>\n{values['context'].strip()}\n</text>"
    facts = {"id": values["_id"], **{name: values[name] for name in ABOUT}}
    return Sample(text, QUESTION.format(**values), "", (values["answer"],), facts)


def chosen(answer: str) -> str | None:
    """The letter that an answer gives in the form asked for, with or without parentheses; None for other answers."""
    plain = answer.replace("*", "")
    found = next((match for pattern in CHOSEN if (match := pattern.search(plain))), None)
    return found and found[1]


def accuracy(answer: str, expected: Sequence[str]) -> float:
    """1 where the letter is the expected one."""
    return float(chosen(answer) == expected[0])
