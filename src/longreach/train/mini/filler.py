"""Real text as tokens, cut only where the tokenizer never merges across."""

from __future__ import annotations

from random import Random

import numpy as np
from tokenizers import Tokenizer

from longreach.errors import LongreachError

SPACE, LINE, PARAGRAPH = 1, 2, 3  # kinds of places at which filler may be cut


class Filler:
    """A token stream with the places at which it may be cut: before " Word" after a sentence, and after a line break.

    A few of its tokens are special ones, where documentation spells them ("</s>"): decoding without them loses those.
    """

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer):
        self.tokens = tokens
        texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
        before = np.zeros(len(texts), dtype=np.uint8)  # what may be cut after this token
        after = np.zeros(len(texts), dtype=np.uint8)  # what may be cut before it: bit 1 " Word", bit 2 a line's start
        for i, text in enumerate(texts):
            if text.endswith("\n\n"):
                before[i] = PARAGRAPH
            elif text.endswith(("\n",)) and len(text) > 1 and text[-2] in ".!?:;)":
                before[i] = LINE
            elif text.endswith((".", "!", "?")):
                before[i] = SPACE
            if len(text) > 1 and text[0] == " " and text[1].isupper():
                after[i] = 1
            elif text and not text[0].isspace() and "\ufffd" not in text:
                after[i] = 2
        left, right = before[tokens[:-1]], after[tokens[1:]]
        kind = np.where(left == SPACE, np.where(right == 1, SPACE, 0), np.where(right == 2, left, 0))
        self.places = np.flatnonzero(kind) + 1  # cut before this token
        self.kinds = kind[self.places - 1].astype(np.uint8)
        self.starts = self.places[self.kinds == PARAGRAPH]
        if not len(self.starts):
            raise LongreachError("the filler has no paragraphs to start at")

    def window(self, random: Random, most: int) -> tuple[int, int, int, int]:
        """A stretch of at most `most` tokens: (start, end, first, last), places[first:last] being its cuts."""
        latest = np.searchsorted(self.starts, max(len(self.tokens) - most, self.starts[0]), side="right")
        start = int(self.starts[random.randrange(int(latest))])
        first = int(np.searchsorted(self.places, start))
        last = int(np.searchsorted(self.places, start + most, side="right"))
        return start, int(self.places[last - 1]), first, last
