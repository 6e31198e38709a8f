"""A hash of host code, for records that measure host code: the chunk store, the code that fills it, kernels for CPUs.

Records of kernels contain launches instead (see `launches`). Comments, docstrings, blank lines and line breaks do not
change the hash; names, numbers and order do.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from pathlib import Path

from longreach.errors import UnknownName

PACKAGE = Path(__file__).parents[1]
SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {  # name -> folder of the package, files in it
    "chunk_store": ("store", ("*.py",)),
    "precompute": (
        "adapters/transformers",
        ("chunking.py", "fingerprint.py", "get_or_compute.py", "precompute.py", "rotary.py"),
    ),
    "cpu_kernels": ("ops", ("numba_*.py", "*/numba*.py")),
}
_SKIP = (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER, tokenize.ENCODING)
_MARKS = {tokenize.NEWLINE: ";", tokenize.INDENT: "{", tokenize.DEDENT: "}"}
_STARTS = {getattr(tokenize, "FSTRING_START", -1)}
_STOPS = {getattr(tokenize, "FSTRING_END", -1)}


def source_hash(name: str, root: Path | None = None) -> str:
    """sha256 of the normalised files of one of SOURCES. root: the package's folder; None for this one."""
    if name not in SOURCES:
        raise UnknownName("sources", name, SOURCES)
    folder, patterns = SOURCES[name]
    base = (PACKAGE if root is None else root) / folder
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(base.glob(pattern)):
            digest.update(f"{path.relative_to(base).as_posix()}\n{normalised(path.read_text())}\n".encode())
    return digest.hexdigest()


def normalised(source: str) -> str:
    """The source reduced to tokens that affect behaviour, on any Python version."""
    lines = source.splitlines(keepends=True)
    docs = _docstrings(source)
    words: list[str] = []
    begun: list[tuple[int, int]] = []  # f-strings are copied from the text, as newer Pythons split them into tokens
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _STARTS:
            begun.append(token.start)
        elif token.type in _STOPS:
            start = begun.pop()
            if not begun:
                words.append(_between(lines, start, token.end))
        elif not begun and token.type not in _SKIP and token.start not in docs:
            if token.string in (")", "]", "}") and words and words[-1] == ",":
                words.pop()  # a trailing comma of a formatter
            mark = _MARKS.get(token.type, token.string)
            if not (mark == ";" and (not words or words[-1] in (";", "{", "}"))):
                words.append(mark)
    return "\x1f".join(words)


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    (first, left), (last, right) = start, end
    if first == last:
        return lines[first - 1][left:right]
    return lines[first - 1][left:] + "".join(lines[first : last - 1]) + lines[last - 1][:right]


def _docstrings(source: str) -> set[tuple[int, int]]:
    """Positions of docstrings: (line, column in characters)."""
    lines = source.splitlines(keepends=True)
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            column = len(lines[first.lineno - 1].encode()[: first.col_offset].decode())
            found.add((first.lineno, column))
    return found
