"""What docs/chunk-store.md shows runs as it stands there, and says what the store says of itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from longreach.store import place
from longreach.store.local import SET_ASIDE_BYTES, LocalFolder

PAGE = (Path(__file__).parent.parent / "docs" / "chunk-store.md").read_text()
EXAMPLES = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)
TEXT = "The brown hen laid an egg in the hay.\n\nThe access code for the archive is 4815162. The fox slept.\n" * 9


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)


def test_chunks_are_computed_then_stored(capsys: pytest.CaptureFixture[str]) -> None:
    for state in ("computed", "stored"):
        exec(compile(EXAMPLES[0], "chunk-store.md", "exec"), {})
        *chunks, report = capsys.readouterr().out.splitlines()
        states = {line.split()[0] for line in chunks}
        assert len(chunks) > 1 and state in states <= {state, "stored"} and "'hits'" in report


def test_a_store_that_cannot_be_opened_is_not_needed(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[1], "chunk-store.md", "exec"), {})
    why, state = capsys.readouterr().out.splitlines()
    assert "cannot open the chunk store notes.txt" in why and state == "computed None"


def test_the_page_names_what_the_code_has() -> None:
    for name in LocalFolder.promises:
        assert name in PAGE, name
    for protocol in place.ATOMIC:
        assert f"`{protocol}`" in PAGE, protocol
    assert f"{SET_ASIDE_BYTES >> 20} MiB" in PAGE and place.MARKER in PAGE
