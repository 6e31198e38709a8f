"""One page that needs nothing else, in which foreign text shows as it is."""

from __future__ import annotations

import base64

import pytest

from longreach.records.report.blocks import Block, Cell, Code, Figure, Heading, Text, table
from longreach.records.report.html import html
from tests.records.report.page import Page
from tests.records.report.test_markdown import NASTY


def everywhere(text: str) -> list[Block]:
    """A text in every place that a report has."""
    cells = table(text, [text], [[text], [Cell(text, text, "worse")]])
    return [
        Heading(1, "t"),
        Heading(2, text),
        Text(text),
        Text(text, True),
        Code(text),
        Figure("a.png", b"", text),
        cells,
    ]


@pytest.mark.parametrize("text", NASTY)
def test_foreign_text_shows_as_it_is(text: str) -> None:
    page = html(everywhere(text))
    page.encode()
    found, expected = Page(page), Page(html(everywhere("x")))
    assert [t for t in found.tags if t != "wbr"] == expected.tags  # nothing but what the same page of plain text has
    line = text if text.isprintable() else text.encode("unicode_escape").decode().replace("\\\\", "\\")
    assert found.cells[1][0].strip() == line.strip()


def test_pictures_are_inside_and_nothing_is_outside() -> None:
    page = Page(html([Heading(1, "t"), Figure("a.png", b"\x89PNG", "see http://evil.example"), Heading(2, "part")]))
    (image,) = page.images
    assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == b"\x89PNG"
    assert image["alt"] == "see http://evil.example"
    assert page.references == [image["src"], "#part-2"] or page.references == ["#part-2", image["src"]]
    assert page.targets == {"part-2"}


def test_phones_and_dark_mode_are_provided_for_and_scripts_are_not() -> None:
    page = html([Heading(1, "t")])
    assert 'name="viewport" content="width=device-width' in page and "prefers-color-scheme: dark" in page
    assert "default-src 'none'" in page and "<script" not in page and "@import" not in page and "url(" not in page


def test_what_is_folded_can_be_opened() -> None:
    page = Page(html([table("many", ["a"], [["1"]], folded=True)]))
    assert page.tags.index("details") < page.tags.index("summary") < page.tags.index("table")
