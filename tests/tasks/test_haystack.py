"""The shipped haystack and the documents cut from it."""

from __future__ import annotations

import hashlib
from importlib.resources import files
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
    with pytest.raises(InvalidInput, match="no room for 1 facts"):
        haystack.document(Random(0), [(0.5, "word " * 50)], 60, words)
