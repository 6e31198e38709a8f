"""Tokens into text as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

HALF = "\ufffd"  # a tokenizer's text for a character with bytes still missing


def pieces(tokens: Iterable[int], tokenizer: Any, stop: Sequence[str] = ()) -> Iterator[str]:
    """The text of an answer piece by piece: whole characters only, without space at its beginning.

    stop: texts that end the answer, themselves left out; what may become one of them is held back until it is known.
    """
    ids: list[int] = []
    text = ""
    shown = 0
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True).lstrip()
        ends = [place for s in stop if (place := text.find(s)) >= 0]
        if ends:
            text = text[: min(ends)]
            break
        ready = len(text) - _held_back(text, stop)
        if not text.endswith(HALF) and ready > shown:
            yield text[shown:ready]
            shown = ready
    if len(text) > shown:
        yield text[shown:]


def _held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a stop text."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
