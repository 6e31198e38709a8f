"""The JSON shape of a record of `longreach mka routing`, whose lists are as long as its levels and positions."""

from __future__ import annotations

from typing import Any

from longreach.records.report.schema import Each, Items, Maybe, Mismatch, Number, check

LEVEL_NAMES = {1: "1 local", 2: "2 session", 3: "3 long-term"}
MEANS = Items(Number(), least=1)
PARTS = Items(MEANS, least=1)
LAYER = {"gate": MEANS, "weight": MEANS, "lambda": MEANS, "by_position": {"weight": PARTS, "lambda": PARTS}}
ROUTING = {
    "files": Items({"name": str, "tokens": int, "sha256": str}, least=1),
    "options": {"variant": str, "routing": str},
    "results": {
        "levels": Items(int, least=1),
        "tokens": int,
        "positions": Items({"start": int, "stop": int}, least=1),
        "layers": Each(LAYER, least=1),
    },
}
ROUTING_CONFIG = {"length": int, "windows": int, "limit": Maybe(int)}


def check_routing(results: dict[str, Any]) -> None:
    """Raise Mismatch unless every list has a value for each level; ROUTING is checked before."""
    levels = results["levels"]
    if levels != sorted(set(levels) & set(LEVEL_NAMES)):
        raise Mismatch(f"results.levels: expected some of {', '.join(map(str, LEVEL_NAMES))}, ascending, got {levels}")
    means = Items(Number(), exactly=len(levels))
    parts = Items(means, exactly=len(results["positions"]))
    shape = {"gate": means, "weight": means, "lambda": means, "by_position": {"weight": parts, "lambda": parts}}
    for layer, one in results["layers"].items():
        if not (layer.isascii() and layer.isdecimal() and len(layer) <= 4):
            raise Mismatch(f"results.layers: expected layer numbers, got {layer[:60]!r}")
        check(one, shape, f"results.layers.{layer}")
