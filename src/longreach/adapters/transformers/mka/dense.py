"""A converted model as the original would be with its present weights, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from longreach.adapters.transformers.attach import MARK
from longreach.adapters.transformers.mka.attention import MemoryAttention
from longreach.adapters.transformers.mka.inputs import add_hook, remove_hook
from longreach.adapters.transformers.mka.levels import give_attention, take_attention
from longreach.errors import ConcurrentUse


@contextmanager
def dense(model: Any) -> Iterator[None]:
    """Within, a converted model computes its family's own attention: projections as they are now, gates ignored.

    Another model stays as it is. Attach within, not around: raises ConcurrentUse if longreach is attached.
    """
    decoder = model.get_decoder()
    if MARK in decoder.__dict__:
        raise ConcurrentUse(f"{type(model).__name__} has longreach attached; close the session first")
    converted: dict[Any, Any] = {m: type(m) for m in model.modules() if isinstance(m, MemoryAttention)}
    try:
        for module in converted:
            take_attention(module)
            module.__class__ = type(module).own
        if converted:
            remove_hook(decoder)
        yield
    finally:
        for module, kind in converted.items():
            module.__class__ = kind
            if module.mka.config.variant != "fastmka":
                give_attention(module)
        if converted:
            add_hook(decoder)
