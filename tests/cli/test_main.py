"""The dispatcher: help, exit codes, errors in one line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from importlib import import_module
from typing import Any

import pytest

from longreach.cli import main as dispatcher


@pytest.mark.parametrize("verb", dispatcher.VERBS)
def test_every_verb_explains_itself_with_examples_and_gives_json(longreach: Any, verb: str) -> None:
    result = longreach(verb, "--help")
    assert result.code == 0 and result.err == ""
    examples = import_module(f"longreach.cli.{verb}").EXAMPLES
    assert all(example in result.out for example in examples) and f"longreach {verb}" in result.out
    assert "--json" in result.out


@pytest.mark.parametrize("verb", dispatcher.VERBS)
def test_the_examples_of_help_are_taken_as_they_stand(verb: str) -> None:
    lines = "\n".join(import_module(f"longreach.cli.{verb}").EXAMPLES).replace("\\\n", " ").splitlines()
    assert any(line.split()[1] == verb for line in lines)
    for line in lines:
        command, *arguments = shlex.split(re.sub(r"\s{2,}\(.*\)$", "", line))
        assert command == "longreach" and dispatcher.build_parser().parse_args(arguments).verb == arguments[0]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "VERB"),
        (("frobnicate",), "frobnicate"),
        (("run", "--model", "mini", "--question", "b"), "--document"),
        (("demo", "--length", "many"), "whole number"),
        (("demo", "--length", "0"), "at least 1"),
        (("run", "--mod", "mini", "--document", "a", "--question", "b"), "--model"),
    ],
)
def test_misuse_is_one_line_that_points_to_help(longreach: Any, arguments: tuple[str, ...], words: str) -> None:
    result = longreach(*arguments)
    assert result.code == 2 and result.out == ""
    assert result.err.count("\n") == 1 and words in result.err and "--help" in result.err


def test_misuse_of_a_verb_points_to_its_help(longreach: Any) -> None:
    given = ("run", "--model", "mini", "--document", "a", "--plan", "b")
    assert longreach(*given).err == "longreach run: unrecognized arguments: --plan b; see longreach run --help\n"
    assert "see longreach plan show --help" in longreach("plan", "show", "a.json", "--json", "--deep").err


def test_an_interrupt_and_a_warning_are_one_line_each(longreach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: Any) -> int:
        warnings.warn("mind\nthe step", stacklevel=1)
        raise KeyboardInterrupt

    monkeypatch.setattr("longreach.cli.methods.run", run)
    result = longreach("methods")
    assert result.code == 130
    assert result.err == "longreach: warning: mind the step\nlongreach: interrupted\n"


def test_what_is_no_error_of_use_is_not_hidden(longreach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("longreach.cli.methods.run", run)
    with pytest.raises(ZeroDivisionError):
        longreach("methods")


def test_a_closed_pipe_and_an_ascii_terminal_are_no_errors() -> None:
    code = (
        "import sys; from longreach.cli import main, methods\n"
        "methods.run = lambda args: [print('é' * 70000) for _ in range(9)] and 0\n"
        "sys.exit(main.main(['methods']))"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert run.stdout and run.stderr
    assert run.stdout.read(3) == b"???"
    run.stdout.close()
    assert run.stderr.read() == b"" and run.wait() == 0
    run.stderr.close()
