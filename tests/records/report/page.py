"""What a browser would see of a page."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "wbr"}


class Page(HTMLParser):
    """tags in order, rows of cells' texts, images, and all that is referred to; asserts that tags are nested well."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.cells: list[list[str]] = []
        self.images: list[dict[str, str]] = []
        self.references: list[str] = []
        self.targets: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = {name: value or "" for name, value in attrs}
        assert not any(name.startswith("on") for name in found)
        self.references += [found[name] for name in ("src", "href", "srcset", "action", "data") if name in found]
        if "id" in found:
            self.targets.add(found["id"])
        if tag == "img":
            self.images.append(found)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if {"td", "th"} & set(self._open):
            self.cells[-1][-1] += data
