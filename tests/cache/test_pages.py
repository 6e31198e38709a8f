"""Who holds which page."""

from __future__ import annotations

from copy import deepcopy

import pytest

from longreach.cache.pages import Pages
from longreach.errors import CapacityError


def take(pages: Pages, **lengths: int) -> None:
    wanted = {int(name[1:]): n for name, n in lengths.items()}
    pages.take(wanted, *pages.sizes_for(wanted))


def test_a_page_is_taken_when_the_last_one_is_full() -> None:
    pages = Pages(slots=2, size=4, total=8, contiguous=False)
    for length, count in ((0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        take(pages, s0=length)
        assert len(pages.held[0]) == count
    assert pages.held[1] == []


def test_released_pages_are_handed_out_again() -> None:
    pages = Pages(slots=2, size=4, total=4, contiguous=False, most=4)
    take(pages, s0=16)
    first = list(pages.held[0])
    pages.release(0, 5)
    assert pages.held[0] == first[:2]
    take(pages, s1=8)
    assert sorted(pages.held[0] + pages.held[1]) == [0, 1, 2, 3] and pages.free == []
    pages.release(0, 5)  # nothing more to give
    assert len(pages.held[0]) == 2


def test_asking_changes_nothing() -> None:
    pages = Pages(slots=2, size=4, total=2, contiguous=False)
    take(pages, s0=3)
    before = ([*map(list, pages.held)], list(pages.free), pages.size, pages.total)
    assert pages.sizes_for({0: 40, 1: 1}) == (4, 16)  # 11 pages
    assert ([*map(list, pages.held)], list(pages.free), pages.size, pages.total) == before


def test_the_pool_doubles_until_there_is_room_and_no_further_than_it_may() -> None:
    assert Pages(1, 4, 3, False).sizes_for({0: 13}) == (4, 6)
    assert Pages(1, 4, 3, False).sizes_for({0: 12}) == (4, 3)
    assert Pages(1, 4, 3, False, most=5).sizes_for({0: 20}) == (4, 5)
    with pytest.raises(CapacityError, match=r"5 pages of 4 tokens, 0 in use, and 6 more"):
        Pages(1, 4, 3, False, most=5).sizes_for({0: 21})


def test_final_lengths_get_what_they_need_and_no_more() -> None:
    assert Pages(2, 4, 2, True).sizes_for({0: 13, 1: 2}, exact=True) == (13, 2)
    assert Pages(2, 4, 2, True).sizes_for({0: 3}, exact=True) == (4, 2)
    assert Pages(2, 4, 3, False).sizes_for({0: 13, 1: 2}, exact=True) == (4, 5)
    assert Pages(2, 4, 3, False, most=5).sizes_for({0: 20}, exact=True) == (4, 5)
    with pytest.raises(CapacityError, match="13 are needed"):
        Pages(1, 4, 1, True, limit=12).sizes_for({0: 13}, exact=True)


def test_contiguous_memory_stretches() -> None:
    pages = Pages(slots=3, size=4, total=3, contiguous=True, limit=12)
    assert pages.held == [[0], [1], [2]]
    assert pages.sizes_for({1: 4}) == (4, 3) and pages.sizes_for({1: 5, 2: 1}) == (8, 3)
    assert pages.sizes_for({0: 9}) == (12, 3)  # 16 would be more than it may
    with pytest.raises(CapacityError, match="holds 12 tokens a sequence, 13 are needed"):
        pages.sizes_for({0: 13})
    take(pages, s1=9)
    pages.release(1, 0)
    assert pages.held == [[0], [1], [2]] and pages.size == 12


def test_nothing_asked_for() -> None:
    for contiguous in (True, False):
        assert Pages(2, 4, 2, contiguous).sizes_for({}) == (4, 2)


def test_shrunk_pages_are_as_many_as_are_needed() -> None:
    pages = Pages(slots=3, size=4, total=16, contiguous=False)
    take(pages, s0=9, s2=4)
    take(pages, s1=5, s0=16)
    before = deepcopy(pages)
    small = pages.shrunk([2, 5, 4])
    assert pages == before and small.held == [[0], [1, 2], [3]] and (small.total, small.free) == (4, [])
    take(small, s0=5)
    assert small.total == 8 and len(small.held[0]) == 2
    assert pages.shrunk([0, 0, 0]).held == [[], [], []] and pages.shrunk([0, 0, 0]).free == [0]
    full = pages.shrunk([16, 5, 4]).shrunk([15, 5, 4])
    assert full.total == 7 and full.free == [], "nothing is free, nothing is renumbered"
    roomy = pages.shrunk([2, 5, 0], room=4)
    assert roomy.held == [[0], [1, 2], []] and (roomy.total, roomy.free) == (5, [4, 3]), "a page more for both"
    assert pages.shrunk([2, 5, 4], room=400).total == 16, "no more than before"
    assert pages.shrunk([2, 5, 4], room=400).held[1] == pages.held[1][:2], "memory of that size keeps its numbers"


def test_a_shrunk_pool_of_a_given_size_keeps_its_pages() -> None:
    pages = Pages(slots=2, size=4, total=8, contiguous=False, most=8)
    take(pages, s0=9, s1=8)
    small = pages.shrunk([1, 8])
    assert small.total == 8 and small.held == [pages.held[0][:1], pages.held[1]] and len(small.free) == 5
    assert sorted([*small.free, *small.held[0], *small.held[1]]) == list(range(8))


def test_shrunk_contiguous_memory_is_as_long_as_the_longest_sequence() -> None:
    pages = Pages(slots=2, size=40, total=2, contiguous=True, limit=40)
    assert (pages.shrunk([3, 7]).size, pages.shrunk([0, 0]).size) == (7, 1)
    assert pages.shrunk([3, 7]).sizes_for({0: 30}) == (40, 2), "doubled, but for the limit"
    assert (pages.shrunk([3, 7], room=5).size, pages.shrunk([3, 7], room=50).size) == (12, 40)


def test_a_pool_of_limited_sequences_never_gets_more_pages_than_they_can_fill() -> None:
    pages = Pages(slots=2, size=4, total=6, contiguous=False, limit=12)
    take(pages, s0=12, s1=5)
    small = pages.shrunk([1, 5])
    assert small.total == 3 and small.sizes_for({0: 12, 1: 8}) == (4, 6) and small.sizes_for({0: 12, 1: 12}) == (4, 6)
