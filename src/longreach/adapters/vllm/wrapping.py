"""Functions of vLLM that longreach adds to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MARK = "_longreach"  # an attribute of functions that have been wrapped


def wrap_once(owner: Any, name: str, wrapped_by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrapped_by(f)` in the place of the function f = owner.name, once a process."""
    plain = getattr(owner, name)
    if not hasattr(plain, MARK):
        new = functools.wraps(plain)(wrapped_by(plain))
        setattr(new, MARK, True)
        setattr(owner, name, new)
