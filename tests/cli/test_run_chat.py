"""`longreach run` without a question, and documents that are kept in a file between runs."""

from __future__ import annotations

import builtins
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longreach import Chat, attach
from longreach.adapters.transformers import load
from longreach.cli.run_chat import _Printer
from tests.cli.test_bad_input import refused

TURNS = ("What is the code for the barn?", "Who slept?")
NEW = 12


def chat_of(model: Path, document: Path, *more: Any) -> list[Any]:
    return ["run", "--model", model, "--document", document, "--max-new-tokens", NEW, *more]


def replies(folder: Path, document: Path) -> list[str]:
    """The answers of longreach.Chat."""
    model, tokenizer = load(folder)
    with attach(model) as session:
        chat = Chat(session, tokenizer, document=document.read_text())
        return [chat.ask(turn, max_new_tokens=NEW).text for turn in TURNS]


def words(*texts: str) -> list[str]:
    """Random models answer with line breaks too."""
    return " ".join(texts).split()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """typed(line, ...): what a user types on a terminal; an exception is raised in place of a line."""

    def set_up(*lines: str | type[BaseException]) -> None:
        left: Iterator[Any] = iter(lines)

        def line(prompt: str = "") -> str:
            found = next(left, EOFError)
            if isinstance(found, str):
                return found
            raise found

        monkeypatch.setattr(builtins, "input", line)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))

    return set_up


def piped(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(content)))


@pytest.mark.parametrize("end", ["exit", "end"])
def test_turns_on_a_terminal(longreach: Any, tiny_chat: Path, document: Path, typed: Any, end: str) -> None:
    typed(TURNS[0], "  ", KeyboardInterrupt, TURNS[1], "exit" if end == "exit" else EOFError, "never asked")
    result = longreach(*chat_of(tiny_chat, document))
    assert result.code == 0 and words(result.out) == words(*replies(tiny_chat, document))
    told = " ".join(result.err.split())
    assert "Ctrl-C stops an answer" in told and "(exit or Ctrl-D ends)" in told
    assert "100.0% in prefill (dense) and 100.0% in decode (dense) of the bytes" in told and "Document: 9" in told


def test_turns_line_by_line(longreach: Any, tiny_chat: Path, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = replies(tiny_chat, document)
    for end in ("\n", "", "\nexit\nnever asked\n"):
        piped(monkeypatch, f"{TURNS[0]}\n\n{TURNS[1]}{end}".encode())
        result = longreach(*chat_of(tiny_chat, document))
        assert result.code == 0
        assert words(result.out) == words(f"> {TURNS[0]}", want[0], f"> {TURNS[1]}", want[1])
    piped(monkeypatch, b"")
    nothing = longreach(*chat_of(tiny_chat, document))
    assert nothing.code == 0 and nothing.out == ""


def test_a_model_without_a_chat_template(
    longreach: Any, tiny: Path, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first turn is the prompt of --question; the second one follows it."""
    piped(monkeypatch, "\n".join(TURNS).encode())
    result = longreach(*chat_of(tiny, document))
    asked = longreach(*chat_of(tiny, document, "--question", TURNS[0]))
    first, second = result.out.removeprefix(f"> {TURNS[0]}\n").split(f"> {TURNS[1]}\n")
    assert result.code == 0 and words(first) == words(asked.out) and second.strip()


def test_an_answer_that_is_stopped_or_fails_keeps_the_session(
    longreach: Any, tiny_chat: Path, document: Path, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = _Printer.put

    def interrupt(self: _Printer, tokens: Any) -> None:
        put(self, tokens)
        if len(self._text._ids) == 3:
            monkeypatch.setattr(_Printer, "put", put)
            raise KeyboardInterrupt

    monkeypatch.setattr(_Printer, "put", interrupt)
    typed("Stop me", "x" * 5000, *TURNS)
    result = longreach(*chat_of(tiny_chat, document))
    assert result.code == 0
    assert "(stopped; this turn is not part of the conversation)" in result.err
    assert "longreach: document and question are" in result.err
    assert words(result.out)[-len(words(*replies(tiny_chat, document))) :] == words(*replies(tiny_chat, document))


SLOWLY = """
import signal
import time
from longreach.cli import main, run_chat

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and so their children, ignore it
put = run_chat._Printer.put

def slow(*args):
    time.sleep(0.1)  # an interrupt comes here, and not within a library's callback, where Python drops it
    put(*args)

run_chat._Printer.put = slow
raise SystemExit(main.main())
"""


@pytest.mark.sweep
def test_a_real_terminal(tiny_chat: Path, document: Path) -> None:
    """Ctrl-C during an answer, a further turn, Ctrl-D."""
    mine, theirs = pty.openpty()
    command = [sys.executable, "-c", SLOWLY, *map(str, chat_of(tiny_chat, document))]
    command[command.index("--max-new-tokens") + 1] = "3000"
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, close_fds=True
    )
    os.close(theirs)
    seen = b""

    def read(wait: float) -> None:
        nonlocal seen
        if select.select([mine], [], [], wait)[0]:
            seen += os.read(mine, 4096)

    def until(text: bytes, interrupting: bool = False) -> None:
        nonlocal seen
        deadline, again = time.monotonic() + 120, 0.0
        while text not in seen:
            assert time.monotonic() < deadline, seen
            if interrupting and time.monotonic() > again:
                child.send_signal(signal.SIGINT)
                again = time.monotonic() + 1.5  # well before the answer is whole
            read(5)
        seen = seen.partition(text)[2]

    until(b"> ")
    os.write(mine, b"first\n")
    until(b"first\r\n")
    while len(seen) < 20:
        read(5)
    until(b"(stopped; this turn", interrupting=True)
    until(b"> ")
    os.write(mine, b"exit\n")
    until(b"Document: ")
    assert child.wait(60) == 0
    os.close(mine)


@pytest.mark.parametrize("method", ["dense", "quest", "mac"])
def test_a_document_is_kept_in_a_file(
    longreach: Any, tiny_chat: Path, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """For questions and for a chat, in either order: the same answers, and the document is not read again."""
    file, ask = tmp_path / "cache", ("--question", TURNS[0], "--json", "--decode", method)
    first = longreach(*chat_of(tiny_chat, document, *ask, "--save-cache", file))
    again = longreach(*chat_of(tiny_chat, document, *ask, "--cache", file))
    assert first.code == again.code == 0
    one, two = (json.loads(result.out) for result in (first, again))
    assert [a["answer"] for a in one["answers"]] == [a["answer"] for a in two["answers"]]
    rows = [next(x["rows"] for x in found["report"]["layers"] if x["phase"] == "prefill") for found in (one, two)]
    assert rows[0] - rows[1] == one["document_tokens"]

    outs = []
    for options in ((), ("--cache", file), ("--save-cache", tmp_path / "other"), ("--cache", tmp_path / "other")):
        piped(monkeypatch, "\n".join(TURNS).encode())
        outs.append(longreach(*chat_of(tiny_chat, document, "--decode", method, *options)))
    assert {(x.code, x.out) for x in outs} == {(0, outs[0].out)}


def test_what_does_not_go_together(
    longreach: Any, tiny: Path, tiny_chat: Path, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other, question = tmp_path / "cache", tmp_path / "other.txt", ("--question", "Who?")
    other.write_text("Something else. " * 9)
    assert longreach(*chat_of(tiny, document, *question, "--save-cache", file)).code == 0
    piped(monkeypatch, b"")
    documents = ["run", "--model", tiny, "--documents", document]
    for command, words in (
        (chat_of(tiny, document, "--json"), ("--json", "give one")),
        (chat_of(tiny, Path("-")), ("--document -", "give a file")),
        (documents, ("--documents: give --question",)),
        ([*documents, *question, "--cache", file], ("--cache: is for --document", "--store DIR")),
        ([*documents, *question, "--save-cache", file], ("--save-cache: is for --document",)),
        (chat_of(tiny, document, *question, "--save-cache", file), ("exists already",)),
        (chat_of(tiny, document, "--save-cache", file), ("exists already",)),
        (chat_of(tiny, document, *question, "--save-cache", tmp_path / "no" / "x"), ("cannot write",)),
        (chat_of(tiny, document, *question, "--cache", tmp_path / "no"), ("No such file",)),
        (chat_of(tiny, other, *question, "--cache", file), ("of another document", "give the --document")),
        (chat_of(tiny, other, "--cache", file), ("of another document",)),
        (chat_of(tiny, document, *question, "--cache", file, "--decode", "quest"), ("decode=dense", "decode=quest")),
        (chat_of(tiny_chat, document, *question, "--cache", file), ("other weights",)),
    ):
        refused(longreach(*command), *words)
    piped(monkeypatch, b"\xff\n")
    assert "not UTF-8" in longreach(*chat_of(tiny, document)).err
    monkeypatch.setattr(sys, "stdin", None)
    refused(longreach(*chat_of(tiny, document)), "standard input is closed")
