"""longreach's name in transformers' tables of attention functions and masks: there while a session lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from longreach.adapters.transformers.attention import NAME, longreach_attention
from longreach.adapters.transformers.mask import mask

_TABLES: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (AttentionInterface, longreach_attention),
    (AttentionMaskInterface, mask),
)
_lock, _sessions = threading.Lock(), 0


def register() -> None:
    """Enter the name for one session more. Each call is to be followed by one of `release`."""
    global _sessions
    with _lock:
        for table, function in _TABLES:
            table.register(NAME, function)
        _sessions += 1


def release() -> None:
    """A session less; with the last one the name goes."""
    global _sessions
    with _lock:
        _sessions -= 1
        if not _sessions:
            for table, _ in _TABLES:  # `register` has no counterpart; masks are looked up in this dict by transformers
                table._global_mapping.pop(NAME, None)
