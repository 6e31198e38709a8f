"""Chunks hold all characters and tokens of a document, none twice and none changed, with every kind of tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from longreach.adapters.transformers import Pieces, Splitter, load, split
from longreach.errors import InvalidInput, Unsupported
from longreach.testing.tiny import tiny_tokenizer

PROSE = (
    "The brown hen laid an egg in the hay. The fox slept; nobody saw him! Did he dream?\n"
    "He did.\n\nA second paragraph says that Émile's café — naïve as ever — had “closed.” It had.\r\n\r\n"
    "\tThird:  two  spaces. 日本語の文。次の文。 🦊🦊 e\u0301 " + "word " * 40 + "\n\n\n\nThe end"
)


def fast(core: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", **options)


def trained(core: Tokenizer, special: list[str], size: int = 420, alphabet: list[str] | None = None) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet or [], show_progress=False
    )
    core.train_from_iterator([PROSE] * 3, trainer)
    core.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing(single="<s> $A </s>",
         special_tokens=[("<s>", core.token_to_id("<s>")), ("</s>", core.token_to_id("</s>"))])]
    )  # fmt: skip
    return core


@cache
def tokenizer(kind: str) -> Any:
    """bytes: one token each; bpe: GPT-2's way, spaces lead words, offsets trimmed; merging: bytes over all borders;
    metaspace, prepend: a space is put before the text (Llama 2); lower: the text is changed; words: spaces are lost."""
    if kind == "bytes":
        return tiny_tokenizer()
    if kind == "mini":
        return load("mini")[1]
    special = ["<unk>", "<s>", "</s>"]
    if kind in ("bpe", "merging", "lower"):
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "merging")
        core.decoder = decoders.ByteLevel()
        if kind == "lower":
            core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        return fast(trained(core, special, alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if kind == "words":
        core = Tokenizer(models.WordLevel(unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        core.train_from_iterator([PROSE], trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
        return fast(core, unk_token="<unk>")
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if kind == "metaspace":
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(trained(core, [*special, *byte_tokens], 700))


KINDS = ("bytes", "mini", "bpe", "merging", "metaspace", "prepend", "lower", "words")
LOSSLESS = ("bytes", "mini", "bpe", "merging", "metaspace", "prepend")


def check(pieces: Pieces, text: str, tok: Any, most: int) -> None:
    """What holds of every account."""
    whole = tok(text, add_special_tokens=False).input_ids
    assert [t for p in pieces.chunks for t in p.tokens] == whole == list(pieces.tokens)
    assert "".join(text[p.start : p.stop] for p in pieces.chunks) == text
    assert all(a.stop == b.start for a, b in zip(pieces.chunks, pieces.chunks[1:]))
    for piece in pieces.chunks:
        assert 1 <= len(piece.tokens) <= most and piece.start < piece.stop
        alone = tok(text[piece.start : piece.stop], add_special_tokens=False).input_ids
        assert piece.alone == (alone == list(piece.tokens))


@pytest.mark.parametrize("most", [7, 16, 64, 10_000])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_doubled_or_changed(kind: str, most: int) -> None:
    pieces = split(PROSE, tokenizer(kind), most)
    check(pieces, PROSE, tokenizer(kind), most)
    if kind in LOSSLESS:  # each chunk's tokens say its text: a border lies where the account says
        assert pieces.restored == len(PROSE)
        for piece in pieces.chunks[1:]:
            decoded = tokenizer(kind).decode(list(pieces.chunks[0].tokens[:1] + piece.tokens))
            assert decoded.endswith(PROSE[piece.start : piece.stop])
    else:
        assert pieces.restored < len(PROSE)
    said = pieces.to_json()
    assert said["joined_tokens_equal_whole"] and said["characters"] == len(PROSE)
    assert said["tokens"] == sum(chunk["tokens"] for chunk in said["chunks"])


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80), st.sampled_from(["bytes", "bpe", "merging", "prepend"]), st.integers(40, 60))
def test_any_text(text: str, kind: str, most: int) -> None:
    check(split(text, tokenizer(kind), most), text, tokenizer(kind), most)


def test_where_chunks_end() -> None:
    """The last paragraph in the second half of the room; else sentence, line, word; a token where nothing ends."""
    tok = tokenizer("bytes")
    cases = {
        "aaaa aa.\n\nbb cc. dd ee": ("aaaa aa.\n\n", "paragraph"),
        "\n\naa bb. cc dd ee ff gg": ("\n\naa bb. ", "sentence"),
        "aa bb cc\ndd ee ff gg hh": ("aa bb cc\n", "line"),
        "aa bb cc dd ee ff gg hh": ("aa bb cc dd ", "word"),
        "aaaaaaaaaaaaaaaaaaaaaaaa": ("aaaaaaaaaaaa", "token"),
        "aa. bb": ("aa. bb", "document"),
        "a.b.c.d.e.f.g.h.i.j.k": ("a.b.c.d.e.f.", "token"),
        "文一。文二文三": ("文一。", "sentence"),
    }
    for text, (first, end) in cases.items():
        piece = split(text, tok, 12).chunks[0]
        assert (text[piece.start : piece.stop], piece.end) == (first, end), text


def test_chunks_may_end_anywhere() -> None:
    text = "One two. Three four five.\n\nSix seven eight. Nine."
    pieces = Splitter(tokenizer("bytes"), 7, anywhere=True).split(text)
    assert pieces.joined == pieces.tokens and [len(p.tokens) for p in pieces.chunks[:-1]] == [7] * (
        len(pieces.chunks) - 1
    )


def test_a_space_that_leads_the_next_word_goes_with_it() -> None:
    """GPT-2's tokenizers trim such spaces from the places they report."""
    text = "The hen laid an egg. The fox slept. " * 20
    pieces = split(text, tokenizer("bpe"), 12)
    assert pieces.chunks[0].end == "sentence" and text[pieces.chunks[1].start :].startswith(" The")
    assert all(piece.alone for piece in pieces.chunks)


def test_a_sentence_that_ends_within_a_token_ends_no_chunk() -> None:
    """The tokenizer merges ". T": there is no border there, and the chunk ends at the next best place."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*alphabet, ".Ġ", ".ĠT"])}
    core = Tokenizer(models.BPE(vocabulary, [(".", "Ġ"), (".Ġ", "T")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    merging, text = PreTrainedTokenizerFast(tokenizer_object=core), "aaaa aa. Tbb cc dd ee"
    first = split(text, tokenizer("bytes"), 12).chunks[0]
    assert (text[: first.stop], first.end) == ("aaaa aa. ", "sentence")
    pieces = split(text, merging, 12)
    assert (text[: pieces.chunks[0].stop], pieces.chunks[0].end) == ("aaaa aa. Tbb ", "word")
    check(pieces, text, merging, 12)


def test_a_space_before_texts_that_stand_alone_is_told() -> None:
    """Joined, the chunks are the document; each by itself would get a space of its own."""
    pieces = split(PROSE, tokenizer("prepend"), 16)
    assert pieces.chunks[0].alone and not any(piece.alone for piece in pieces.chunks[1:])
    assert pieces.to_json()["other_tokens_alone"] == len(pieces.chunks) - 1


def test_special_tokens() -> None:
    """None is added; those that the text spells out are counted, and read as text."""
    for kind in ("bytes", "bpe", "prepend"):
        tok = tokenizer(kind)
        plain = split("a hen </s> a fox", tok)
        assert plain.special == 1 and tok.eos_token_id not in plain.tokens and plain.joined == plain.tokens
        assert tok.decode(plain.tokens).strip() == "a hen </s> a fox" and plain.restored == plain.characters
        assert [plain.chunks[-1].stop, plain.chunks[0].alone] == [16, True]
        clean = split("a hen a fox", tok)
        assert clean.special == 0 and tok.bos_token_id not in clean.tokens


def test_documents_without_text() -> None:
    assert split("", tokenizer("bpe")).chunks == ()
    (only,) = split(" \n\n ", tokenizer("bpe")).chunks
    assert (only.start, only.stop, only.end) == (0, 4, "document")
    with pytest.raises(InvalidInput, match="makes no tokens of this text of 3 characters"):
        split("   ", tokenizer("words"))


def test_a_document_longer_than_any_context() -> None:
    text = "The hen laid an egg. " * 3000
    pieces = split(text, tokenizer("mini"), 512)
    assert len(pieces.tokens) > 16384 and len(pieces.chunks) < 2 * len(pieces.tokens) / 512
    assert "".join(text[p.start : p.stop] for p in pieces.chunks) == text


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(InvalidInput, match="3 are too few, '🦊' at character 2 takes 4"):
        split("ab🦊cd", tokenizer("bytes"), 3)
    with pytest.raises(InvalidInput, match="expected a count >= 1, got 0"):
        split("a", tokenizer("bytes"), 0)
    with pytest.raises(InvalidInput, match="not UTF-8"):
        split("a\ud83d", tokenizer("bytes"))
    with pytest.raises(Unsupported, match="fast tokenizer"):
        Splitter(object())


@pytest.mark.parametrize("document", [b"bytes", None, 7, ["a list"]])
def test_what_is_no_text_is_no_document(document: Any) -> None:
    with pytest.raises(InvalidInput, match=r"must be text \(str\), got"):
        Splitter(tiny_tokenizer(), 8).split(document)


def test_a_tokenizer_that_does_more_than_its_core_is_refused() -> None:
    class Odd(PreTrainedTokenizerFast):
        def __call__(self, text: Any, **options: Any) -> Any:
            return super().__call__(text.replace("x", "y"), **options)

    odd = Odd(tokenizer_object=tokenizer("bytes").backend_tokenizer)
    assert len(split("abc", odd).tokens) == 3
    with pytest.raises(Unsupported, match="Odd makes other tokens than its core"):
        split("axc", odd)


def test_the_users_tokenizer_is_left_alone() -> None:
    tok = tokenizer("bpe")
    before = tok.backend_tokenizer.to_str()
    split(PROSE, tok, 16)
    assert tok.backend_tokenizer.to_str() == before
