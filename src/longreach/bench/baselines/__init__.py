"""Other kernels, each at its best: one file a baseline, which offers candidates; the fastest right one competes.

A baseline module has TITLE, load() -> versions (Unsupported with the remedy where it cannot be loaded) and
candidates(inputs) -> [(settings, build)], where build() -> Competitor does all planning outside the timed graph.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from longreach.bench.competitor import Competitor
from longreach.bench.inputs import Inputs
from longreach.errors import UnknownName

NAMES = ("flashinfer", "flash_attention_3", "torch_sdpa", "transformers_static")
ON_CPU = ("torch_sdpa", "transformers_static")
Candidate = tuple[dict[str, Any], Callable[[], Competitor]]


def baseline(name: str) -> Any:
    """The module of a baseline. Raises UnknownName."""
    if name not in NAMES:
        raise UnknownName("baseline", name, NAMES)
    return import_module(f"longreach.bench.baselines.{name}")


def candidates(name: str, inputs: Inputs) -> list[Candidate]:
    """All settings a baseline is tried with."""
    found: list[Candidate] = baseline(name).candidates(inputs)
    return found
