"""A tiny model directory, a document, and the command line called in this process."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from longreach.cli import show
from longreach.cli.main import main
from longreach.tasks.ruler.common_words import CommonWords
from longreach.tasks.ruler.frequent_words import FrequentWords
from longreach.tasks.ruler.niah import Niah
from longreach.tasks.ruler.questions import Questions
from longreach.tasks.ruler.tracing import Tracing
from longreach.testing.tiny import save_tiny

DRAWING = [import_module(f"longreach.records.report.plots.{n}") for n in "heat_maps layer_curves lines scatter".split()]
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)  # a picture of one
TEXT = "The brown hen laid an egg. The code for the barn is 4815162. The fox slept all day long.\n"


class Result(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, one token a byte, 4096 tokens of context."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a chat template."""
    return save_tiny(tmp_path_factory.mktemp("models") / "chat", chat=True, seed=1)


@pytest.fixture(scope="session")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text file."""
    path = tmp_path_factory.mktemp("documents") / "notes.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def laid_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are laid out and not drawn, which takes most of their time; tests that use `drawn` draw them."""
    if "drawn" not in request.fixturenames:
        for module in DRAWING:
            monkeypatch.setattr(module, "png", lambda made: PIXEL)


@pytest.fixture
def drawn() -> None:
    """Pictures are drawn in this test."""


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of 8 tokens, for tasks that allow up to 128: random models use them all."""
    for task in (Niah, CommonWords, FrequentWords, Tracing, Questions):
        monkeypatch.setattr(task, "max_new_tokens", 8)


@pytest.fixture
def longreach(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`longreach(verb, ...)`: exit code, standard output and standard error, at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(show, "log", show.Log(every=math.inf))  # standard error is the same on slow machines

    def call(*arguments: Any) -> Result:
        capsys.readouterr()
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as exit:  # argparse leaves by itself
            code = int(exit.code or 0)
        return Result(code, *capsys.readouterr())

    return call
