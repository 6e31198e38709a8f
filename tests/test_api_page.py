"""docs/api.md has every public name, as its docstring has it now."""

from __future__ import annotations

import longreach
from tests import api_page


def test_the_page_is_up_to_date() -> None:
    assert api_page.PAGE.read_text() == api_page.page(), "run: python -m tests.api_page"


def test_every_public_name_is_documented() -> None:
    text = api_page.page()
    for name in longreach._NAMES:
        part = text.split(f"\n### {name}\n")[1].split("\n### ")[0]
        assert f"```python\n{name}" in part and len(part.split("```")[2].split()) > 5, name
    assert set(longreach._NAMES) >= {
        name for names in api_page.PARTS.values() for name in names if "." not in name
    } - set(api_page.RESULTS)
