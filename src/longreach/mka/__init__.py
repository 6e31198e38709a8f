"""Attention trained over local, session and long-term memory. Names are resolved on first use.

`register`, `revert` and `parameter_groups` belong to models of transformers. They are named here by strings, as in the
package's own front door, since this room lies below the adapters.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "MKAConfig": "longreach.mka.config",
    "Levels": "longreach.mka.levels",
    "AttentionShape": "longreach.mka.module",
    "LayerState": "longreach.mka.module",
    "attention": "longreach.mka.module",
    "parameter_groups": "longreach.adapters.transformers.mka",
    "register": "longreach.adapters.transformers.mka",
    "revert": "longreach.adapters.transformers.mka",
}
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'longreach.mka' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
