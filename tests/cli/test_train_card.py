"""--card: its arguments, apart from the verb that takes them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from longreach.cli.train_card import add_card_arguments, run_card
from longreach.errors import InvalidInput, ModelFileError


def parsed(*arguments: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_card_arguments(parser)
    return parser.parse_args([str(a) for a in arguments])


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (["--logs", "a", "--records", "b"], "--model DIR too"),
        (["--model", "m"], r"--logs FILE \.\.\. and --records FILE \.\.\. too"),
    ],
)
def test_all_three_are_needed(given: list[str], missing: str) -> None:
    with pytest.raises(InvalidInput, match=missing):
        run_card(parsed("--card", *given))


def test_what_it_hands_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from longreach.train.mini import card

    args = parsed("--card", "--model", tmp_path, "--logs", "one", "two", "--records", "r")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        run_card(args)
    handed: list[Any] = []
    monkeypatch.setattr(card, "write", lambda *inputs: handed.extend(inputs))
    assert run_card(args) == 0 and handed == [tmp_path, [Path("one"), Path("two")], [Path("r")]]
    assert "loss.png" in capsys.readouterr().out and not parsed().card
