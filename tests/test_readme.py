"""What README.md tells a newcomer to type works as it stands there."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longreach.cli.main import main
from longreach.tasks.ruler.niah import Niah
from longreach.tasks.ruler.tracing import Tracing
from longreach.testing.tiny import save_tiny
from tests.cli.conftest import DRAWING, PIXEL

ROOT = Path(__file__).parent.parent
TEXT = "The brown hen laid an egg in the hay. " * 12 + "The access code for the archive is 4815162. The fox slept.\n"


def blocks(language: str) -> list[str]:
    """Fenced blocks of README.md in this language ("" for none)."""
    found = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text())
    return [code for name, code in found if name == language]


def commands() -> Iterator[list[str]]:
    for block in blocks(""):
        for line in block.splitlines():
            if line.strip():
                yield shlex.split(line, comments=True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the documents and the model of its own that README speaks of."""
    for name in ("notes.txt", "report.txt"):
        (tmp_path / name).write_text(TEXT)
    save_tiny(tmp_path / "Llama-3.1-8B-Instruct", chat=True, max_position_embeddings=8192)
    for task in (Niah, Tracing):  # a random model answers in as many tokens as it may
        monkeypatch.setattr(task, "max_new_tokens", 8)
    for module in DRAWING:  # pictures are laid out, not drawn
        monkeypatch.setattr(module, "png", lambda made: PIXEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHORT = {"8192": "2400", "2048": "941", "4": "1"}  # tokens of a byte each, which hold every task; samples


def cases() -> Iterator[Any]:
    """The commands; the fast tier runs shorter ones in the place of long ones. The demo is tests/cli/test_demo.py's."""
    for words in commands():
        if words[0] == "longreach":
            short = [SHORT.get(word, word) for word in words]
            slow = words == ["longreach", "demo"] or words != short
            yield pytest.param(words, id=" ".join(words), marks=[pytest.mark.sweep] if slow else [])
            if words != short:
                yield pytest.param(short, id=" ".join(short))


@pytest.mark.parametrize("command", [*cases()])
def test_commands(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    asked = io.TextIOWrapper(io.BytesIO(b"What is the access code for the archive?\n"))
    monkeypatch.setattr("sys.stdin", asked)  # of a chat
    assert main(command[1:]) == 0
    out = capsys.readouterr().out
    assert out.strip()
    if "mini" in command and "run" in command:
        assert "4815162" in out


def test_the_other_commands_are_targets_of_the_makefile() -> None:
    others = [c for c in commands() if c[0] != "longreach"]
    targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
    assert others and all(c[0] == "make" and set(c[1:]) <= set(targets) for c in others)


@pytest.mark.parametrize("code", blocks("python"))
def test_python(place: Path, capsys: pytest.CaptureFixture[str], code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert out.strip()
    if "session.report()" in code:
        assert "of the bytes that dense attention reads" in out
