"""What a progress bar says."""

from __future__ import annotations

from longreach.evals.progress import counted


def test_one_is_no_plural() -> None:
    assert [counted(n, "method") for n in (0, 1, 2)] == ["0 methods", "1 method", "2 methods"]
