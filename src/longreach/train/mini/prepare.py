"""`longreach train mini --prepare DIR`: corpus, tokenizer and token files that training reads."""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from longreach.errors import LongreachError
from longreach.tasks import haystack as shipped
from longreach.tasks.words import evaluation_words
from longreach.train.mini import corpus as corpora
from longreach.train.mini.config import ModelShape
from longreach.train.mini.forms import needles
from longreach.train.mini.keys import KeySource
from longreach.train.mini.overlap import OverlapIndex
from longreach.train.mini.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer


def common_words(texts: list[str], count: int) -> list[str]:
    """The most common lower-case words of 4 to 10 letters, without those that evaluation keys are made of."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall(r"(?<![\w.])[a-z]{4,10}(?![\w.])", text))
    reserved = evaluation_words()
    words = [w for w, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if w not in reserved]
    return sorted(words[:count])


def task_text(words: list[str], episodes: int) -> Iterator[str]:
    """Rendered training facts and questions, for the tokenizer and the overlap check."""
    random, keys = Random("tokenizer"), KeySource(words)
    for _ in range(episodes):
        intro, facts = needles.draw_facts(random, keys, 8)
        asked = [f"{e.question}{e.answer}" for e in needles.exchanges(random, facts)]
        yield "\n".join([intro, *needles.order(random, facts), *asked])


def prepare(
    folder: Path,
    *,
    haystack: Path | None = None,
    limit_files: int | None = None,
    packages: Sequence[str] = tuple(corpora.PACKAGES),
    tokenizer: Path | None = None,
    vocab_size: int = ModelShape.vocab_size,
    tokenizer_chars: int = 16_000_000,
    number_repeats: int = 400,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Build everything that training needs; deterministic for given package versions.

    Writes into `folder`: tokenizer.json, tokenizer_config.json, prose.bin.xz and code.bin.xz (uint16 tokens),
    words.json, manifest.json; haystack.txt and haystack.json into `haystack`, where it is given. The evaluation's
    haystack stays as it is shipped: other versions of the packages bring another, and the training text is kept apart
    from both.

    tokenizer: folder of an existing one (tokenizer.json) to use, for training a model further that has it; None: train
    one on the text.

    Raises InvalidInput for a tokenizer that cannot be read or has too many tokens for 16 bits.

    Returns:
        the manifest: sources with versions, licences and hashes; characters; tokens; overlap check.
    """
    if tokenizer is not None:  # before the text is read, which takes minutes
        found = load_tokenizer(tokenizer)
    held_out = shipped.paragraphs()
    corpus = corpora.build(limit_files, packages, say, held_out)
    if haystack is not None:
        corpora.write_haystack(corpus, haystack)
    words = common_words(corpus.prose, 4000)
    tasks = list(task_text(words, 2000 if limit_files is None else 50))
    if OverlapIndex(["\n\n".join(corpus.haystack), "\n\n".join(held_out)]).hits("\n".join(tasks)):
        raise LongreachError("a task template shares 64 characters with the haystack; reword it")
    if tokenizer is None:
        sample = [*take(corpus.prose, tokenizer_chars * 2 // 3), *take(corpus.code, tokenizer_chars // 3), *tasks]
        say("training the tokenizer")
        found = train_tokenizer(sample, vocab_size, number_repeats)
    save_tokenizer(found, folder, ModelShape.max_position_embeddings)
    say("turning the text into tokens")
    tokens = {
        kind: write_tokens(folder / f"{kind}.bin.xz", texts, found)
        for kind, texts in (("prose", corpus.prose), ("code", corpus.code))
    }
    (folder / "words.json").write_text(json.dumps(words) + "\n")
    manifest = {**corpus.manifest, "tokens": tokens, "haystack_sha256": shipped.sha256()}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def take(texts: list[str], characters: int) -> Iterator[str]:
    """Texts from the front until `characters` characters are reached."""
    for text in texts:
        if characters <= 0:
            return
        yield text
        characters -= len(text)


def write_tokens(path: Path, texts: list[str], tokenizer: Tokenizer) -> int:
    """Tokenise each text, an empty line after it, and write all tokens as compressed uint16; returns their count."""
    parts = []
    for at in range(0, len(texts), 2000):
        encoded = tokenizer.encode_batch_fast([t + "\n\n" for t in texts[at : at + 2000]], add_special_tokens=False)
        parts += [np.asarray(e.ids, dtype=np.uint16) for e in encoded]
    tokens = np.concatenate(parts)
    path.write_bytes(lzma.compress(tokens.tobytes(), preset=3))
    return len(tokens)
