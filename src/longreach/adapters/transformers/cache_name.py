"""How transformers names the cache among the parameters of models and layers: `cache` from 5.24 on.

Before, it was `past_key_values`, which 5.24 takes as well, with a warning. An attached model takes `past_key_values` in
all versions, without one. Layers and models that are not attached get the name of the installed version.
"""

from __future__ import annotations

from typing import Any

import transformers

OLD = "past_key_values"
CACHE = "cache" if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24) else OLD


def renamed(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a call under the names of this version."""
    if CACHE == OLD or OLD not in given:
        return given
    return {CACHE: given[OLD], **{name: value for name, value in given.items() if name != OLD}}
