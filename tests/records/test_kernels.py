"""The kernels' hash: blind to comments and form, not to anything that runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import longreach.ops
from longreach.errors import UnknownName
from longreach.records.kernels import PACKAGE, SOURCES, kernel_hash, normalised

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


@pytest.mark.parametrize("operator", SOURCES)
def test_every_pattern_names_a_file(operator: str) -> None:
    folder, patterns = SOURCES[operator]
    assert all(any((PACKAGE / folder).glob(pattern)) for pattern in patterns)


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("matching", "ops/nearest/triton_kernels.py"),
        ("matching", "ops/append/triton.py"),
        ("attend", "ops/attend/triton_amend_kernels.py"),
        ("mac", "cache/ring.py"),
        ("mac", "methods/mac/method.py"),
    ],
)
def test_what_a_step_of_mac_runs_is_hashed(operator: str, name: str, tmp_path: Path) -> None:
    for room in ("ops", "cache", "methods"):
        shutil.copytree(PACKAGE / room, tmp_path / room)
    path = tmp_path / name
    path.write_text(path.read_text() + "\nLATER = 1\n")
    assert kernel_hash(operator, tmp_path) != kernel_hash(operator)


def test_the_hash_covers_the_kernels_and_what_calls_them(tmp_path: Path) -> None:
    root = tmp_path / "longreach"
    shutil.copytree(Path(longreach.ops.__file__).parent, root / "ops")
    whole = kernel_hash("attend")
    assert kernel_hash("attend", root) == whole
    for name in ("attend/api.py", "attend/triton_kernels.py", "selection.py"):
        path = root / "ops" / name
        text = path.read_text()
        path.write_text(text + "\nLATER = 1\n")
        assert kernel_hash("attend", root) != whole
        path.write_text(text + "\n# a remark\n")
        assert kernel_hash("attend", root) == whole
    with pytest.raises(UnknownName, match="attend"):
        kernel_hash("attent")
