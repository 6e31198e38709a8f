"""Streaming text: whole characters, stops, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longreach.adapters.transformers.answer_text import pieces
from longreach.testing.tiny import EOS_ID, tiny_tokenizer

TOKENIZER = tiny_tokenizer()  # one token a byte


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


def test_characters_come_whole() -> None:
    assert list(pieces(encode("aé日b"), TOKENIZER)) == ["a", "é", "日", "b"]


def test_space_at_the_beginning_and_special_tokens_are_left_out() -> None:
    assert list(pieces([*encode(" \n a b"), EOS_ID], TOKENIZER)) == ["a", " ", "b"]
    assert list(pieces([], TOKENIZER)) == list(pieces(encode("  \n"), TOKENIZER)) == []


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    assert "".join(pieces(encode("aé")[:-1], TOKENIZER)) == "a\ufffd"


@pytest.mark.parametrize(
    "text, stop, found",
    [
        ("one\n\ntwo", ("\n\n",), ["o", "n", "e"]),
        ("one\ntwo", ("\n\n",), ["o", "n", "e", "\nt", "w", "o"]),  # held back until it is no stop
        ("abcab", ("cabx",), ["a", "b", "cab"]),
        ("xyz", ("zq", "y"), ["x"]),
    ],
)
def test_stop_texts_end_the_answer_and_are_never_shown(text: str, stop: tuple[str, ...], found: list[str]) -> None:
    assert list(pieces(encode(text), TOKENIZER, stop)) == found


def test_nothing_is_asked_for_after_a_stop_text() -> None:
    def tokens():  # type: ignore[no-untyped-def]
        yield from encode("one.")
        raise AssertionError("a token after the stop was computed")

    assert "".join(pieces(tokens(), TOKENIZER, (".",))) == "one"


words = st.text(alphabet="ab é日\n", max_size=12)


@given(words, st.lists(st.text(alphabet="ab é\n", min_size=1, max_size=3), max_size=2))
def test_the_pieces_are_the_text_up_to_the_first_stop(text: str, stop: list[str]) -> None:
    whole = text.lstrip()
    ends = []
    for n in range(1, len(encode(text)) + 1):  # the first moment at which any stop text is there
        so_far = TOKENIZER.decode(encode(text)[:n]).lstrip()
        ends = [so_far.find(s) for s in stop if s in so_far]
        if ends:
            break
    assert "".join(pieces(encode(text), TOKENIZER, stop)) == (whole[: min(ends)] if ends else whole)
