"""Hashes of kernels: blind to layout, places and names of what is called, not to anything that runs on the GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longreach.records.kernels import PACKAGE, UnreadableKernel, kernels

KERNELS = '''
"""A module."""
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from longreach.ops.helpers import triton_parts as parts
from longreach.ops.helpers.triton_parts import HALF

SIZE, OTHER = tl.constexpr(8), tl.constexpr(9)


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def copy(a, b, N: tl.constexpr):
    """Doc."""
    i = tl.program_id(0) * SIZE  # where
    gdc_wait()
    tl.store(b + i, parts.scaled(_twice(tl.load(a + i)), N), mask=i < N)


@triton.jit
def other(a):
    tl.store(a, HALF)


def host(a):
    copy[(1,)](a, a, 8, num_warps=4)
'''
PARTS = """
import triton
import triton.language as tl

HALF = tl.constexpr(0.5)
UNUSED = tl.constexpr(1)


@triton.jit
def scaled(x, N: tl.constexpr):
    if N > 1:
        x = x * HALF
    return x
"""
PLACE, HELPERS = "ops/copying/triton_kernels.py", "ops/helpers/triton_parts.py"


def tree(root: Path, text: str = KERNELS, parts: str = PARTS, place: str = PLACE) -> Path:
    for name, content in ((place, text), (HELPERS, parts)):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def hashes(root: Path, text: str = KERNELS, parts: str = PARTS, place: str = PLACE) -> dict[str, str]:
    """By function name."""
    shutil.rmtree(root, ignore_errors=True)
    kernels.cache_clear()
    return {name: sha256 for (_, name), sha256 in kernels(tree(root, text, parts, place)).items()}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    kernels.cache_clear()


def changed(root: Path, old: str, new: str, what: str = "kernels") -> set[str]:
    """Kernels whose hash an edit changes."""
    before = hashes(root)
    text, parts = KERNELS, PARTS
    if what == "kernels":
        assert old in text
        text = text.replace(old, new)
    else:
        assert old in parts
        parts = parts.replace(old, new)
    after = hashes(root, text, parts)
    return {name for name in before if after.get(name) != before[name]}


def test_kernels_are_named_by_file_and_function(tmp_path: Path) -> None:
    assert set(kernels(tree(tmp_path))) == {
        (PLACE, "_twice"), (PLACE, "copy"), (PLACE, "other"), (HELPERS, "scaled"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    """Doc."""\n', ""),
        ("  # where", ""),
        ("    gdc_wait()", "    # a remark\n\n    gdc_wait()"),
        ("tl.store(a, HALF)", "tl.store(\n        a,\n        HALF,\n    )"),
        ("num_warps=4", "num_warps=8"),  # host code
        ("(a, b, N: tl.constexpr):", "(a, b, N: tl.constexpr) -> None:"),
        ("_twice", "_doubled"),
        ("import triton_parts as parts", "import triton_parts as p"),
    ],
)
def test_form_host_code_and_names_of_what_is_called_do_not_count(tmp_path: Path, old: str, new: str) -> None:
    new_parts = new == "import triton_parts as p"
    before = hashes(tmp_path)
    text = KERNELS.replace(old, new)
    after = hashes(tmp_path, text.replace("parts.scaled", "p.scaled") if new_parts else text)
    assert text != KERNELS and set(before.values()) == set(after.values())


@pytest.mark.parametrize(
    ("old", "new", "what", "kernels"),
    [
        ("tl.program_id(0)", "tl.program_id(1)", "kernels", {"copy"}),
        ("i < N", "i <= N", "kernels", {"copy"}),
        ("N: tl.constexpr", "N", "kernels", {"copy"}),
        ("return x + x", "return x * x", "kernels", {"_twice", "copy"}),  # what it calls
        ("tl.constexpr(8)", "tl.constexpr(16)", "kernels", {"copy"}),  # a constant of the module
        ("tl.constexpr(9)", "tl.constexpr(16)", "kernels", set()),  # one that nobody uses
        ("x = x * HALF", "x = HALF * x", "parts", {"copy", "scaled"}),  # in another file
        ("tl.constexpr(0.5)", "tl.constexpr(0.25)", "parts", {"copy", "scaled", "other"}),
        ("tl.constexpr(1)", "tl.constexpr(2)", "parts", set()),
        ("import gdc_wait", "import gdc_launch_dependents as gdc_wait", "kernels", {"copy"}),
        ("import triton.language as tl", "import triton.other as tl", "kernels", {"copy", "other"}),
        ("@triton.jit\ndef other", "@triton.jit(noinline=True)\ndef other", "kernels", {"other"}),
    ],
)
def test_what_runs_counts_where_it_is_used(tmp_path: Path, old: str, new: str, what: str, kernels: set[str]) -> None:
    assert changed(tmp_path, old, new, what) == kernels


def test_a_kernel_that_moves_keeps_its_hash(tmp_path: Path) -> None:
    assert hashes(tmp_path) == hashes(tmp_path, place="ops/elsewhere/triton_here.py")
    before, after = hashes(tmp_path), hashes(tmp_path, KERNELS.replace("def copy(", "def moved("))
    assert after["moved"] == before["copy"]


def test_two_constants_of_one_statement_are_told_apart(tmp_path: Path) -> None:
    assert changed(tmp_path, "SIZE, OTHER", "OTHER, SIZE") == {"copy"}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("tl.load(a + i)", "load(a + i)", "load, which a kernel uses, is defined nowhere"),
        ("parts.scaled(", "parts(", "uses the module longreach.ops.helpers.triton_parts"),
        ("return x + x", "return _twice(x)", "_twice is defined by itself"),
        ("parts.scaled(", "parts.missing(", "missing, which a kernel uses"),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    with pytest.raises(UnreadableKernel, match=why):
        hashes(tmp_path, KERNELS.replace(old, new))


def test_every_kernel_of_the_package_can_be_followed() -> None:
    found = kernels()
    assert len(found) > 60 and {name for _, name in found} >= {"attend_pieces", "merge_pieces", "append_rows"}


def test_neither_triton_nor_torch_is_needed() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = sys.modules['torch'] = None\n"
        "from longreach.records.kernels import kernels\n"
        "from longreach.records.stale import stale\n"
        "assert len(kernels()) > 60\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(PACKAGE.parent)}, timeout=120)
