"""README's numbers are those of the records."""

from __future__ import annotations

from pathlib import Path

import pytest

from longreach.bench.readme import markers, numbers, rewritten, update
from longreach.errors import InvalidInput

ROOT = Path(__file__).parents[2]


def test_readme_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text()
    assert rewritten(text, ROOT / "benchmarks/results") == text, "run `longreach bench readme`"


def test_only_what_lies_between_the_markers_changes(tmp_path: Path) -> None:
    (a, b), (c, d) = markers("records"), markers("quality")
    text = f"before {a}\nold\n{b} between {c}{d} after"
    new = f"before {a}\n{numbers(tmp_path)}\n{b} between {c}\nNo evaluations yet.\n{d} after"
    assert rewritten(text, tmp_path) == new
    with pytest.raises(InvalidInput, match="put them back"):
        rewritten("no markers", tmp_path)


def test_without_records_nothing_is_wiped_out(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    for place in (tmp_path / "missing", tmp_path):
        with pytest.raises(InvalidInput, match="holds no records"):
            update(readme, place)
    assert readme.read_text() == (ROOT / "README.md").read_text()
