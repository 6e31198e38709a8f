"""Layers that are alike share one layout, and what depends on it is computed once."""

from __future__ import annotations

import pytest

from longreach.cache.layouts import Layouts
from longreach.cache.pages import Pages
from longreach.errors import InvalidInput, Unsupported


def made() -> Layouts:
    """Four layers, two sequences of 10 and 5 tokens; layers 1 and 3 keep 3 slots of the first."""
    layouts = Layouts(4, Pages(2, 4, 8, False))
    layouts[0].take({0: 10, 1: 5}, 4, 8)
    for layer in (1, 3):
        layouts[layer] = layouts[layer].evicted([10, 5], {0: 3})
    return layouts


def test_equal_layouts_are_one() -> None:
    layouts = made()
    assert layouts[0] is layouts[2] and layouts[1] is layouts[3] and layouts[0] is not layouts[1]
    assert layouts.groups() == [layouts[0], layouts[1]]
    assert layouts.spread(["a", "b"]) == ("a", "b", "a", "b")
    assert Layouts(4, Pages(2, 4, 8, False)).spread(["a"]) == ("a",)


def test_slots_in_use_and_room_for_more() -> None:
    layouts = made()
    assert [layout.in_use({0: 10, 1: 5}) for layout in layouts.groups()] == [{0: 10, 1: 5}, {0: 3, 1: 5}]
    sizes = layouts.sizes_for({0: 21, 1: 5}, exact=True)
    assert [each[1:] for each in sizes] == [(4, 8), (4, 6)], "6 + 2 pages and 4 + 2"
    for layout, size, total in sizes:
        layout.take({0: 21, 1: 5}, size, total)
    assert [len(layout.pages.held[0]) for layout in layouts.groups()] == [6, 4]


def test_tables_of_all_groups_have_one_width() -> None:
    layouts = made()
    table = layouts.tables([1, 0])
    assert table.shape == (2, 2, 4), "an even one: each group begins at a multiple of 16 bytes"
    for group, layout in enumerate(layouts.groups()):
        for row, slot in enumerate((1, 0)):
            pages = layout.pages.held[slot]
            assert table[group, row].tolist() == pages + [0] * (4 - len(pages))
    assert [layout.width([1, 0]) for layout in layouts.groups()] == [3, 2]
    assert layouts.tables([0], 5).shape == (2, 1, 5)
    with pytest.raises(InvalidInput, match="table: 3 pages do not fit into 2 columns"):
        layouts.tables([0], 2)


def test_cuts() -> None:
    layouts = made()
    layouts.check_cut(0, 10)
    layouts.check_cut(1, 1)
    layouts.check_cut(0, 0)
    with pytest.raises(Unsupported, match="evicted from slot 0 at 10 tokens, so it cannot be cut to 9"):
        layouts.check_cut(0, 9)
    layouts.check_overwrite(1, 2)
    with pytest.raises(Unsupported, match=r"position 2 of slot 0 .* evicted from it in layers \[1, 3\]"):
        layouts.check_overwrite(0, 2)
    layouts.cut(0, 0)
    assert [layout.in_use({0: 7}) for layout in layouts.groups()] == [{0: 7}] * 2
    layouts.check_overwrite(0, 2)
