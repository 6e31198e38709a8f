"""Progress of long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from longreach.adapters.transformers import Advance

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""`with progress("reading", total) as advance: ... advance(n)`: what is done, and how many units of it."""


def counted(number: int, what: str) -> str:
    """ "1 method", "2 methods"."""
    return f"{number} {what}{'s' * (number != 1)}"


@contextmanager
def unseen(what: str, total: int) -> Iterator[Advance]:
    """Progress that is not shown."""
    yield lambda done: None
