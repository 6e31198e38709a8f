"""The tokenizer of longreach-mini: byte-level BPE trained on training text only; numbers in groups of three digits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from longreach.errors import InvalidInput, LongreachError
from longreach.train.mini.config import BOS, BOS_ID, EOS, EOS_ID, PAD, PAD_ID

# Words keep their leading space, digits come in groups of at most three from the left, line breaks end a piece.
# No piece holds a space or a word after a non-space, so text may be cut before " word" and after a line break
# and tokenised in parts: the parts' tokens, joined, are the tokens of the whole.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def number_text(repeats: int) -> str:
    """Every number of one to three digits, often enough that each becomes one token."""
    numbers = [f"{n:0{digits}d}" for digits in (1, 2, 3) for n in range(10**digits)]
    return "\n".join(" ".join(numbers) for _ in range(repeats))


def train_tokenizer(texts: Iterable[str], vocab_size: int, number_repeats: int = 400) -> Tokenizer:
    """Train on the texts and on numbers.

    Raises:
        LongreachError: a number of up to three digits did not become one token (raise `number_repeats`).
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def stream() -> Iterable[str]:
        yield from texts
        for _ in range(20):
            yield number_text(max(1, number_repeats // 20))

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(stream(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    if [tokenizer.token_to_id(t) for t in (PAD, BOS, EOS)] != [PAD_ID, BOS_ID, EOS_ID]:
        raise LongreachError("the tokenizer's special tokens are out of place")
    split = [n for n in number_text(1).split() if tokenizer.token_to_id(n) is None]
    if split:
        raise LongreachError(f"{len(split)} numbers are not one token, such as {split[0]}; raise number_repeats")
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder. Raises InvalidInput for one that is not there, or has other tokens than the recipe's.

    Training data holds tokens of 16 bits, and the special tokens of longreach-mini.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more special
        raise InvalidInput(f"{path}: expected a tokenizer, and it cannot be read: {error}") from error
    special = [tokenizer.token_to_id(t) for t in (PAD, BOS, EOS)]
    if special != [PAD_ID, BOS_ID, EOS_ID] or tokenizer.get_vocab_size() > 1 << 16:
        raise InvalidInput(
            f"{path}: expected a tokenizer of longreach-mini: {PAD}, {BOS} and {EOS} as tokens 0, 1 and 2, and at most "
            f"65536 tokens; got {special} and {tokenizer.get_vocab_size()} tokens"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers' AutoTokenizer loads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n")
