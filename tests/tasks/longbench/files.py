"""Small files in the form of the official ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def entry(dataset: str, **fields: Any) -> dict[str, Any]:
    """A line of LongBench."""
    given = {
        "input": "Who {wrote} it?",
        "context": "It was written {by} Ada.",
        "answers": ["Ada 1"],
        "length": 5,
        "dataset": dataset,
        "language": "en",
        "all_classes": ["Ada 1", "Food"],
        "_id": "0f",
    }
    return {**given, **fields}


def entry_v2(**fields: Any) -> dict[str, Any]:
    """An entry of LongBench v2."""
    given = {
        "_id": "66e",
        "domain": "Code Repository Understanding",
        "sub_domain": "Code repo QA",
        "difficulty": "hard",
        "length": "short",
        "question": "Which {one}?",
        "choice_A": "first",
        "choice_B": "second",
        "choice_C": "third",
        "choice_D": "fourth",
        "answer": "C",
        "context": "A text with {braces}.",
    }
    return {**given, **fields}


def write_lines(path: Path, *lines: Any) -> Path:
    """Each object as a line of JSON, texts as they are."""
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in lines))
    return path
