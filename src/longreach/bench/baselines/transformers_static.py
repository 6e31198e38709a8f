"""transformers' own generate on its static cache: a baseline of whole models, which bench/decoding.py times."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from longreach.bench.inputs import Inputs

TITLE = "transformers generate, static cache"


def load() -> dict[str, str]:
    return {"transformers": metadata.version("transformers")}


def candidates(inputs: Inputs) -> list[tuple[dict[str, Any], Any]]:
    """None: it has no attention kernel of its own to offer."""
    return []
