"""Methods of a record of `longreach sampling`, by line: one method at several budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

GROUP, OWN = "magicpig share=group", "magicpig share=own"
CONTROLS = ("magicpig centre=0", "magicpig, no weights")
TABLES, BITS = 120, (11, 10, 9, 8, 7)  # Table 12 of the paper
ORACLES = ("oracle_top_k", "oracle_sampling")


def bytes_read(mine: dict[str, Any]) -> float:
    """A result's bytes over dense attention's. Of oracles those of attention alone, as keys and values of the chosen
    keys: their scores are free."""
    reads = mine["reads"]
    return float(2 * reads["values"] if mine["method"]["name"] in ORACLES else reads["total"])


def lines(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Line -> its results, fewest bytes first. Of MagicPIG the presets only, which all its lines have."""
    wanted, found = presets(results), dict[str, list[dict[str, Any]]]()
    for mine in results["methods"].values():
        method = mine["method"]
        if method["name"] != "magicpig" or (method["bits"], method["tables"]) in wanted:
            found.setdefault(mine["line"], []).append(mine)
    return {name: sorted(some, key=bytes_read) for name, some in found.items()}


def presets(results: dict[str, Any]) -> list[tuple[int, int]]:
    """(bits, tables) that were run without weights too, ascending."""
    found = (mine["method"] for mine in results["methods"].values() if not mine["weights"])
    return sorted({(method["bits"], method["tables"]) for method in found})


def label_of(results: dict[str, Any], line: str, bits: int, tables: int) -> str | None:
    """The label of MagicPIG with these tables; None if it was not run."""
    for label, mine in results["methods"].items():
        method = mine["method"]
        if mine["line"] == line and (method.get("bits"), method.get("tables")) == (bits, tables):
            return str(label)
    return None


def method_of(results: dict[str, Any], line: str, bits: int, tables: int) -> dict[str, Any]:
    """The result of MagicPIG with these tables."""
    found: dict[str, Any] = results["methods"][label_of(results, line, bits, tables)]
    return found


def pair(bits: int, tables: int) -> str:
    """ "10, 150"."""
    return f"{bits}, {tables}"


def at_bytes(some: Sequence[dict[str, Any]], wanted: float) -> float | None:
    """The mean error at this share of the bytes, between the two budgets around it: linear in both logarithms. None
    outside of the budgets."""
    points = [(bytes_read(mine), mine["mean"]) for mine in some]
    for (x, a), (y, b) in pairwise(points):
        if x <= wanted <= y and 0 < x < y and min(a, b) > 0:
            part = math.log(wanted / x) / math.log(y / x)
            return float(a ** (1 - part) * b**part)
    return None
