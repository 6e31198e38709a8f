"""The shipped haystack and the documents cut from it."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path
from random import Random

import pytest

from longreach.errors import InvalidInput, ModelFileError
from longreach.tasks import haystack


def words(text: str) -> int:
    return len(text.split())


def test_the_shipped_text_is_the_recorded_one() -> None:
    raw = (files("longreach.tasks.haystack") / "haystack.txt").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == haystack.sha256()
    assert len(raw) <= 2_000_000
    assert "\n\n".join(haystack.paragraphs()) == raw.decode().strip()


def test_a_changed_haystack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haystack, "sha256", lambda: "0" * 64)
    haystack.paragraphs.cache_clear()
    with pytest.raises(ModelFileError, match="reinstall"):
        haystack.paragraphs()
    haystack.paragraphs.cache_clear()


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_a_fact_stands_at_its_depth_and_the_length_holds(depth: float) -> None:
    text = haystack.document(Random(3), [(depth, "Here it is.")], 2000, words, "Read this.")
    assert 1800 < words(text) <= 2000
    assert text.startswith("Read this.\n\n")
    assert text.count("Here it is.") == 1
    assert abs(text.index("Here it is.") / len(text) - depth) < 0.03


def test_facts_keep_their_order_and_the_text_its_words() -> None:
    facts = [(0.7, "Third fact."), (0.1, "First fact."), (0.4, "Second fact.")]
    with_facts = haystack.document(Random(5), facts, 800, words)
    places = [with_facts.index(f"{n} fact.") for n in ("First", "Second", "Third")]
    assert places == sorted(places)
    without = haystack.document(Random(5), [], 800, words)
    for _, fact in facts:
        with_facts = with_facts.replace(fact, "")
    assert with_facts.split() == without.split()[: len(with_facts.split())]


def test_different_seeds_give_different_text() -> None:
    texts = {haystack.document(Random(i), [], 300, words) for i in range(5)}
    assert len(texts) == 5


def test_no_room_is_an_error() -> None:
    with pytest.raises(
        InvalidInput, match=r"60 tokens has no room for 1 facts; ask for a longer one, \d+ tokens or more"
    ):
        haystack.document(Random(0), [(0.5, "word " * 50)], 60, words)


@pytest.mark.parametrize("intro", ["", "Read this."])
@pytest.mark.parametrize("seed", range(20))
def test_a_text_has_real_words_or_there_is_none(seed: int, intro: str) -> None:
    for room in range(20, 100, 3):  # whatever of the first sentences fits
        try:
            text = haystack.document(Random(seed), [(0.5, "Here it is.")], room, words, intro, what="x", beside=7)
        except InvalidInput as error:
            least = int(str(error).split("at least ")[1].split()[0]) - 7
            assert str(error).startswith("x takes") and f"{room + 7} are there" in str(error) and least > room
            assert "Here" in haystack.document(Random(seed), [(0.5, "Here it is.")], least, words, intro)
        else:
            assert words(text) <= room and words(text) > words(f"{intro} Here it is.")
            assert words(text) >= 0.8 * room - 6  # a token more than its words is set aside for each sentence


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    text = "\ufeffOne camel\n went by. Then another.\n\n \n\nA third camel came.\n"
    path.write_text(text, encoding="utf-8")
    assert haystack.read(path) == ("One camel went by. Then another.", "A third camel came.")
    text = haystack.document(Random(1), [(0.5, "A needle.")], 200, words, essay=path)
    assert set(text.replace("A needle.", "").split()) == set("One camel went by. Then another. A third came.".split())
    assert text.count("A needle.") == 1 and 170 < words(text) <= 200
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert haystack.named("RULER", None) == "RULER"
    assert haystack.named("RULER", path) == f"RULER; sha256 {sha256}, haystack own.txt"
    path.write_text("Another text.")
    assert sha256 not in haystack.named("RULER", path)


def test_a_text_that_is_none(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text(" \n\n ")
    binary.write_bytes(b"\xff\xfe")
    for path, message in ((empty, "is empty"), (binary, "is not UTF-8"), (tmp_path / "none", "cannot read .*none")):
        with pytest.raises(InvalidInput, match=message):
            haystack.read(path)
