"""The JSON shape of a record of attention, which depends on its own lists of layers, keys and bins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from longreach.records.report.schema import Items, Maybe, Mismatch, Number, check

SHARE = Number(0, 1.001)  # rounding may add to one
COSINE = Number(-1.001, 1.001)
COUNT = Number(0, 1 << 62)
SAMPLE = {"task": str, "number": int, "tokens": int, "answer_tokens": int, "right": int}
LISTS = {
    "windows": Items(Maybe(int), least=1),
    "sink_keys": int,
    "last_keys": Items(int, least=1),
    "top_keys": Items(int, least=1),
    "cover": SHARE,
    "distance_edges": Items(int, least=2),
    "recent_queries": int,
    "taus": Items(SHARE, least=1),
    "agreement_keys": int,
    "queries_unknown": dict,
    "rows": {"text": {"count": int, "sinks": Items(Items(SHARE, least=1), least=1)}, "answer": dict},
    "retrieval": dict,
}
ATTENTION = {"samples": Items(SAMPLE, least=1), "results": LISTS}


def check_attention(results: dict[str, Any]) -> None:
    """Raise Mismatch unless all lists are as long as those that head them; LISTS is checked before."""
    layers, heads = len(results["windows"]), len(results["rows"]["text"]["sinks"][0])
    for name in ("distance_edges", "last_keys", "top_keys"):
        if results[name][0] < 0 or any(a >= b for a, b in pairwise(results[name])):
            raise Mismatch(f"results.{name}: expected whole numbers from 0 on, each above the one before")
    if not results["retrieval"]:
        raise Mismatch("results.retrieval: expected at least one task, got none")

    def each(shape: Any, there: bool = True) -> Items:
        inner = Items(shape, exactly=heads)
        return Items(inner if there else Maybe(inner), exactly=layers)

    def several(shape: Any, count: int, there: bool = True) -> Items:
        return each(Items(shape, exactly=count), there)

    rows = {
        "count": int, "sinks": each(SHARE), "windows": several(SHARE, len(results["last_keys"])),
        "distance": several(SHARE, len(results["distance_edges"]) - 1),
        "tops": several(SHARE, len(results["top_keys"])), "cover": each(COUNT), "virtual_sink": each(SHARE),
        "previous": each(COSINE, False), "best": each(COSINE, False),
        "match": several(SHARE, len(results["taus"]), False),
        "agreement": {name: Items(Items(Maybe(COUNT), exactly=layers), exactly=layers) for name in ("recall", "mass")},
    }  # fmt: skip
    for kind in ("text", "answer"):
        check(results["rows"][kind], rows, f"results.rows.{kind}")
    for task, found in results["retrieval"].items():
        check(found, {"score": each(SHARE, False), "needle": each(SHARE, False)}, f"results.retrieval.{task}")
