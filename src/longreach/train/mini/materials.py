"""What training sequences are made from: a tokenizer, real text, keys and words that evaluation does not use."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from longreach.train.mini.filler import Filler
from longreach.train.mini.keys import KeySource


@dataclass(frozen=True)
class Materials:
    """prose and code: token streams. keys: the training half. words: common words that evaluation has no keys of."""

    tokenizer: Tokenizer
    prose: Filler
    code: Filler
    keys: KeySource
    words: tuple[str, ...]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text, without BOS."""
        return [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def tokens(self, text: str) -> list[int]:
        """Tokens of one text, without BOS."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def filler(self, random: Random, prose: float) -> Filler:
        """Prose in that share of the cases, code otherwise."""
        return self.prose if random.random() < prose else self.code


def load_materials(folder: Path) -> Materials:
    """What `prepare` wrote into a folder: the tokenizer, prose.bin.xz and code.bin.xz (uint16 tokens), words.json."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prose, code = (
        Filler(np.frombuffer(lzma.decompress((folder / f"{kind}.bin.xz").read_bytes()), dtype=np.uint16), tokenizer)
        for kind in ("prose", "code")
    )
    words = json.loads((folder / "words.json").read_text())
    return Materials(tokenizer, prose, code, KeySource(words), tuple(words))
