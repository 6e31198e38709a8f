"""Documents cut into chunks, with the characters and tokens of each, and a check that nothing was changed.

A document is tokenised once, as a whole, and cut between tokens. So its chunks' tokens, joined, are its tokens, and
their texts, joined, are its text; a tokenizer that merges across a border, or puts a space before a text that stands
alone, has nothing to change: a chunk ends at the best place that is a border of the whole document's tokens. The report
names the chunks that the tokenizer would split differently if given their text alone.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from longreach.adapters.transformers.control_tokens import ControlTokens, Part
from longreach.errors import InvalidInput, Unsupported

TOKENS = 512  # default limit of a chunk
PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
SENTENCE = re.compile(r"[.!?\u2026][\"'\u201d\u2019)\]]*(?:\s+|$)|[\u3002\uff01\uff1f][\u300d\u300f\u201d]*\s*")
LINE = re.compile(r"\n")
ENDS = ("document", "paragraph", "sentence", "line", "word", "token")  # ends of chunks, best first


@dataclass(frozen=True)
class Piece:
    """A chunk: characters [start, stop) of the document, and its tokens among those of the whole document.

    end: one of ENDS. alone: whether the tokenizer makes the same tokens of this text when it is given by itself.
    """

    start: int
    stop: int
    tokens: tuple[int, ...]
    end: str
    alone: bool


@dataclass(frozen=True)
class Pieces:
    """A document's chunks, in order, and the account of them.

    chunks: together all characters and all tokens, none twice. special: how many control tokens of the tokenizer the
    document's own text spells out; they are read as text. restored: characters up to which the tokens, decoded, are the
    text; the tokenizer itself changes what follows (lower case, spaces, normal forms), in chunks as in any prompt.
    """

    characters: int
    tokens: tuple[int, ...]
    chunks: tuple[Piece, ...]
    special: int
    restored: int

    def to_json(self) -> dict[str, Any]:
        """The account, without the tokens themselves."""
        return {
            "characters": self.characters,
            "tokens": len(self.tokens),
            "special_tokens_in_text": self.special,
            "restored_characters": self.restored,
            "joined_tokens_equal_whole": self.joined == self.tokens,
            "other_tokens_alone": sum(not piece.alone for piece in self.chunks),
            "chunks": [
                {"start": p.start, "stop": p.stop, "tokens": len(p.tokens), "end": p.end, "same_alone": p.alone}
                for p in self.chunks
            ],
        }

    @property
    def joined(self) -> tuple[int, ...]:
        """The tokens of all chunks, one chunk after the other."""
        return tuple(token for piece in self.chunks for token in piece.tokens)


class Splitter:
    """Cuts documents for one tokenizer.

    most: tokens of a chunk at most. A chunk ends with the last paragraph that ends in the second half of that room,
    else with the last sentence, line or word there, else at the last border between two tokens that is one between
    characters too. anywhere: always at that border, so that all chunks but the last are full. Raises Unsupported for a
    tokenizer without text offsets, InvalidInput.
    """

    def __init__(self, tokenizer: Any, most: int = TOKENS, *, anywhere: bool = False):
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise InvalidInput(f"chunk tokens: expected a count >= 1, got {most!r}")
        self.tokenizer, self.most, self.anywhere = tokenizer, most, anywhere
        self.core, self.control = _untrimmed(tokenizer), ControlTokens(tokenizer)

    def split(self, text: str) -> Pieces:
        """The chunks of a document; none of an empty one. Special tokens are not added: they belong to the prefix.
        Control tokens that the text spells out are split into text.

        Raises InvalidInput: it is no str, or holds what is no Unicode text; `most` is too few for one of its
        characters; the tokenizer cannot split its control tokens.
        """
        if not isinstance(text, str):
            raise InvalidInput(f"a document must be text (str), got {type(text).__name__}; decode it first")
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise InvalidInput("a document must be text; this one holds bytes that are not UTF-8")
        tokens = self._plain(text)
        spelled = self.control.names(tokens)
        encoding = self.core.encode(text, add_special_tokens=False)
        if tokens != list(encoding.ids):
            raise Unsupported(
                f"{type(self.tokenizer).__name__} makes other tokens than its core does, so that where they lie in the "
                f"text is not known; use the tokenizer as its model's folder has it"
            )
        offsets = encoding.offsets
        if spelled:
            tokens, offsets = self.control.encode([Part(text, True)])
        if text and not tokens:
            raise InvalidInput(f"the tokenizer makes no tokens of this text of {len(text)} characters")
        chunks = tuple(self._pieces(text, tokens, offsets))
        restored = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Pieces(len(text), tuple(tokens), chunks, len(spelled), _common(text, restored))

    def _alone(self, text: str) -> list[int]:
        tokens = self._plain(text)
        return self.control.encode([Part(text, True)]).ids if self.control.names(tokens) else tokens

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _pieces(self, text: str, tokens: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Iterable[Piece]:
        borders, places = _borders(offsets, len(text))
        quality = _quality(text, places)
        first = 0
        while first < len(borders) - 1:
            last = bisect_right(borders, borders[first] + self.most) - 1
            if last == first:
                begin, end = places[first], places[first + 1]
                raise InvalidInput(
                    f"chunk tokens: {self.most} are too few, {text[begin:end][:20]!r} at character {begin} takes "
                    f"{borders[first + 1] - borders[first]} that cannot be parted; allow more"
                )
            if last < len(borders) - 1 and not self.anywhere:
                half = max(first + 1, bisect_left(borders, borders[first] + (self.most + 1) // 2))
                last = min(range(min(half, last), last + 1), key=lambda n: (quality[n], -n))
            begin, end = places[first], places[last]
            ids = tuple(tokens[borders[first] : borders[last]])
            yield Piece(begin, end, ids, ENDS[quality[last]], list(ids) == self._alone(text[begin:end]))
            first = last


def split(text: str, tokenizer: Any, most: int = TOKENS) -> Pieces:
    """A document's chunks of at most `most` tokens; see Splitter."""
    return Splitter(tokenizer, most).split(text)


def _untrimmed(tokenizer: Any) -> Tokenizer:
    """A copy of the tokenizer's core with offsets that include spaces: post-processing trims them off."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(core, Tokenizer):
        raise Unsupported(
            f"{type(tokenizer).__name__} does not say where in the text its tokens lie; documents are cut with a fast "
            f"tokenizer (one with a tokenizer.json)"
        )
    copied = Tokenizer.from_str(json.dumps({**json.loads(core.to_str()), "post_processor": None}))
    copied.no_truncation()
    copied.no_padding()
    return copied


def _borders(offsets: Sequence[tuple[int, int]], length: int) -> tuple[list[int], list[int]]:
    """(tokens before each border, characters before it), both ends included: where no character is parted.

    Characters that no token holds (spaces, in some tokenizers) go with the chunk before them.
    """
    borders, places, reached = [0], [0], 0
    for index, (start, stop) in enumerate(offsets):
        if index and start >= reached and start > places[-1] and stop > start:
            borders.append(index)
            places.append(start)
        reached = max(reached, stop)
    if offsets:
        borders.append(len(offsets))
        places.append(length)
    return borders, places


def _quality(text: str, places: Sequence[int]) -> list[int]:
    """For each border, the index in ENDS of the kind of end there."""
    found = [len(ENDS) - 1] * len(places)

    def mark(kind: str, spans: Iterable[tuple[int, int]]) -> None:
        for first, last in spans:
            for n in range(bisect_left(places, first), bisect_right(places, last)):
                found[n] = min(found[n], ENDS.index(kind))

    mark("word", ((m.start(), m.end()) for m in re.finditer(r"\s+", text)))
    mark("line", ((m.end(), m.end()) for m in LINE.finditer(text)))
    # anywhere in the space after a sentence: whether a token begins or ends with it is the tokenizer's habit
    mark("sentence", ((len(m.group().rstrip()) + m.start(), m.end()) for m in SENTENCE.finditer(text)))
    mark("paragraph", ((m.start() + 1, m.end()) for m in PARAGRAPH.finditer(text)))
    mark("document", [(len(text), len(text))])
    return found


def _common(text: str, other: str) -> int:
    """Number of characters in the common prefix of two texts."""
    if text == other:
        return len(text)
    return next((n for n, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
