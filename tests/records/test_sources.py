"""The hash of host code: blind to comments and form, not to anything that runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from longreach.errors import UnknownName
from longreach.records.sources import PACKAGE, SOURCES, normalised, source_hash

CODE = '''
def f(x, y):
    """Doc."""
    if x:  # why
        return g(x, f"a{y!r} b")
    return y
'''


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace('"""Doc."""', '"""Another\n    text."""'),
        CODE.replace("  # why", ""),
        CODE.replace("    return y", "\n    # here\n\n    return y"),
        CODE.replace('g(x, f"a{y!r} b")', 'g(\n            x,\n            f"a{y!r} b",\n        )'),
    ],
)
def test_form_does_not_count(same: str) -> None:
    assert same != CODE and normalised(same) == normalised(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return y", "return x"),
        ("    return y", "        return y"),
        ("a{y!r} b", "a{y!r}  b"),
        ("g(x, ", "g(x + 1, "),
        ("if x:", "if not x:"),
        ("(x, y)", "(y, x)"),
    ],
)
def test_what_runs_counts(old: str, new: str) -> None:
    changed = CODE.replace(old, new)
    assert changed != CODE and normalised(changed) != normalised(CODE)


def test_text_that_is_no_docstring_counts() -> None:
    assert normalised('x = """a"""\n') != normalised('x = """b"""\n')


@pytest.mark.parametrize("name", SOURCES)
def test_every_pattern_names_a_file(name: str) -> None:
    folder, patterns = SOURCES[name]
    assert all(any((PACKAGE / folder).glob(pattern)) for pattern in patterns)


@pytest.mark.parametrize("name", ["key.py", "layout.py", "writing.py"])
def test_the_hash_covers_every_file_of_the_store(name: str, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "store", tmp_path / "store")
    whole = source_hash("chunk_store")
    assert source_hash("chunk_store", tmp_path) == whole
    path = tmp_path / "store" / name
    path.write_text(path.read_text() + "\nLATER = 1\n")
    assert source_hash("chunk_store", tmp_path) != whole
    with pytest.raises(UnknownName, match="chunk_store"):
        source_hash("chunk_stores")
