"""Tokens into text as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

HALF = "\ufffd"  # a tokenizer's text for a character with bytes still missing


class AnswerText:
    """The text of an answer token by token: whole characters only, without space at its beginning.

    stop: texts that end the answer, themselves left out; what may become one of them is held back until it is known.
    ended: whether one of them came.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._text, self._shown, self.ended = "", 0, False

    def add(self, token: int) -> str:
        """The text that is known now and was not before."""
        if self.ended:
            return ""
        self._ids.append(token)
        self._text = self._tokenizer.decode(self._ids, skip_special_tokens=True).lstrip()
        ends = [place for s in self._stop if (place := self._text.find(s)) >= 0]
        if ends:
            self._text, self.ended = self._text[: min(ends)], True
            return self.rest()
        ready = len(self._text) - _held_back(self._text, self._stop)
        return "" if self._text.endswith(HALF) else self._upto(ready)

    def rest(self) -> str:
        """What was held back, once the answer is over."""
        return self._upto(len(self._text))

    def _upto(self, end: int) -> str:
        found, self._shown = self._text[self._shown : end], max(self._shown, end)
        return found


def pieces(tokens: Iterable[int], tokenizer: Any, stop: Sequence[str] = ()) -> Iterator[str]:
    """The text of an answer piece by piece, as of `AnswerText`. No token is taken after a stop text."""
    text = AnswerText(tokenizer, stop)
    for token in tokens:
        if piece := text.add(token):
            yield piece
        if text.ended:
            return
    if piece := text.rest():
        yield piece


def _held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a stop text."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
