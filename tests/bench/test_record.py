"""What is no bench record is refused, not tripped over."""

from __future__ import annotations

from pathlib import Path

import pytest

from longreach.bench.record import add, read
from longreach.errors import InvalidInput


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"kind": "eval"}', '{"kind": "bench", "format": 1}', '{"kind":"bench","format":1,"cases":[1]}']
)
def test_what_is_no_bench_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"a\.json is no .*record"):
        read(path)
    with pytest.raises(InvalidInput, match=r"a\.json is no .*record"):
        add(path, "g", "c", {})
    assert path.read_text() == text


def test_a_case_measured_again_replaces_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for case, result in (("one", {"n": 1}), ("two", {"n": 2}), ("one", {"n": 3})):
        add(path, "g", case, result)
    assert read(path)["cases"] == {"one": {"n": 3}, "two": {"n": 2}}
