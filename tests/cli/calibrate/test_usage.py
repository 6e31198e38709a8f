"""The text that `longreach calibrate` prints for a plan is the text of a method that uses it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from longreach.cli.calibrate import KINDS
from longreach.cli.calibrate.common import usage
from longreach.methods.registry import choose, choose_fusion


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_takes_it(kind: str) -> None:
    [text] = shlex.split(usage(kind, Path("my plans/a.json")))
    method = choose_fusion(text) if kind == "a3_deep" else choose("decode", text)
    assert method is not None and method.name == kind and method.to_json()["plan"] == "my plans/a.json"
