"""Importing longreach loads nothing heavy; its names resolve when used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import longreach


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, longreach, longreach.cli.main; "
        "heavy = {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules); print(sorted(heavy))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from longreach.cli.main import build_parser; text = build_parser().format_help(); "
        "heavy = {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules); print('demo' in text, sorted(heavy))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "True []"


@pytest.mark.parametrize("name", longreach.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(longreach, name) is not None
    assert name in dir(longreach)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'attatch'.*attach"):
        _ = longreach.attatch
