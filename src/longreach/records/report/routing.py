"""Weights of the memory levels of a model with MKA's layers, by layer and by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LEVEL_NAMES = {1: "1 local", 2: "2 session", 3: "3 long-term"}


def level_names(results: dict[str, Any]) -> list[str]:
    """Names of the levels in use."""
    return [LEVEL_NAMES[level] for level in results["levels"]]


def over_layers(values: Sequence[Sequence[float]]) -> list[float]:
    """Means [levels] of values [layers][levels]."""
    return [sum(column) / len(column) for column in zip(*values, strict=True)]


def by_position(results: dict[str, Any], quantity: str) -> list[list[float]]:
    """Means [parts][levels] over layers."""
    layers = [layer["by_position"][quantity] for layer in results["layers"].values()]
    return [over_layers(part) for part in zip(*layers, strict=True)]
