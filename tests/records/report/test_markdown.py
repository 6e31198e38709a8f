"""Markdown in which foreign text shows as it is."""

from __future__ import annotations

import re

import pytest

from longreach.records.report.blocks import Cell, Code, Figure, Heading, Text, table
from longreach.records.report.markdown import escaped, markdown

NASTY = [
    "<script>alert(1)</script>", "a | b", "a \\| b", "`code` ``more``", "*bold* _it_ __it__ ~~gone~~", "$x^2$",
    "[link](http://evil.example) ![i](x.png)", "http://evil.example www.evil.example", "line\nbreak\r\n\n# heading",
    "# heading", "> quote", "- item", "1. item", "===", "&lt;", "\\", "tab\there", "a\u202eb", "nul\0", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("text", NASTY)
def test_a_cell_stays_one_cell_on_one_line(text: str) -> None:
    document = markdown([table("t", ["a", "b"], [[text, Cell("1", text, "worse")]])])
    lines = document.strip().splitlines()
    assert len(lines) == 5  # title, blank, head, rule, row
    assert len(re.findall(r"(?<!\\)\|", lines[-1])) == 3 and "|" not in lines[-1].strip("|").replace(" | ", "", 1)
    document.encode()


@pytest.mark.parametrize("text", NASTY)
def test_no_markup_begins_in_foreign_text(text: str) -> None:
    (line,) = markdown([Text(text)]).strip("\n").split("\n")
    plain = re.sub(r"\\[!-/:-@\[-`{-~]", "", line)  # what a backslash escapes is plain text
    assert not re.search(r"[<>`*\[\]~$]|(?<!\w)_|_(?!\w)|://|www\.", plain), line
    assert not re.match(r"[-+=#>]|\d+[.)]", line), line
    assert not re.search(r"&(?!amp;|lt;|gt;|#124;)", plain), line


def test_names_stay_readable() -> None:
    assert escaped("oracle_top_k k=0.025") == "oracle_top_k k=0.025"
    assert escaped("a\nb\x07") == "a\\\\nb\\\\x07"


def test_code_cannot_be_left() -> None:
    document = markdown([Code("a\n```\n<b>\n````")])
    assert document == "`````\na\n```\n<b>\n````\n`````\n"


def test_code_holds_no_more_than_can_be_printed() -> None:
    assert markdown([Code("a\n\tb\ud800\u202e")]) == "```\na\n\\tb\\ud800\\u202e\n```\n"


def test_headings_pictures_and_what_is_loud() -> None:
    document = markdown([Heading(2, "A | *b*"), Figure("x.png", b"", "what [it] shows"), Text("mind this", loud=True)])
    assert document == (
        "## A &#124; \\*b\\*\n\n![what \\[it\\] shows](x.png)\n\nwhat \\[it\\] shows\n\n> **mind this**\n"
    )
