"""What the kinds of calibration are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("".join(f"Hen {n} laid {n * n % 97} eggs in barn {n % 7}. " for n in range(60)))
    return path
