"""README's numbers are those of the records."""

from __future__ import annotations

from pathlib import Path

import pytest

from longreach.bench.readme import BEGIN, END, numbers, rewritten
from longreach.errors import InvalidInput

ROOT = Path(__file__).parents[2]


def test_readme_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text()
    assert rewritten(text, ROOT / "benchmarks/results") == text, "run `longreach bench readme`"


def test_only_what_lies_between_the_markers_changes(tmp_path: Path) -> None:
    text = f"before {BEGIN}\nold\n{END} after"
    assert rewritten(text, tmp_path) == f"before {BEGIN}\n{numbers(tmp_path)}\n{END} after"
    with pytest.raises(InvalidInput, match="put them back"):
        rewritten("no markers", tmp_path)
