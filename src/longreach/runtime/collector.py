"""Keep Python's garbage collector away from a CUDA graph that is being captured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Within this block no garbage is collected.

    To free an old CUDA graph invalidates the capture of a new one, and garbage may hold one.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
