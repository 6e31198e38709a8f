"""The JSON shape of a record of `longreach sampling`, which depends on its own lists of layers and budgets."""

from __future__ import annotations

from typing import Any

from longreach.records.report.sampling_lines import BITS, CONTROLS, GROUP, OWN, TABLES, label_of, presets
from longreach.records.report.schema import Each, Items, Maybe, Mismatch, Number, Perhaps, check

SIZE = Number(0, 1 << 62)
SHARE = Number(0, 1.001)  # rounding may add to one
COSINE = Number(-1.001, 1.001)
LAYERS = Items(Maybe(Items(SIZE, least=1)), least=1)
ERRORS = {"errors": LAYERS, "mean": SIZE, "median": SIZE}
MOST_BITS, MOST_TABLES = 16, 1024
PAIR = {"bits": int, "tables": int}
METHOD = {
    "method": {"name": str, "bits": Perhaps(int), "tables": Perhaps(int), "k": Perhaps(SIZE)},
    "line": str,
    "weights": bool,
    **ERRORS,
    "reads": {"total": SIZE, "keys": SIZE, "values": SIZE, "metadata": SIZE},
    "layer_reads": Items(Maybe(SIZE), least=1),
    **{name: Perhaps(SIZE) for name in ("search", "attention", "table_share")},
    **{name: Perhaps(LAYERS) for name in ("sampled_head", "sampled_group")},
}
ESTIMATOR = {name: Items(SIZE, least=1) for name in ("budgets", "read", "mean", "median")}
NAMES = ("top_k", "iid", "systematic")
GEOMETRY = {
    **{name: {"min": Items(Maybe(Items(COSINE))), "mean": Items(Maybe(Items(COSINE)))}
       for name in ("first_keys", "mean_keys", "first_keys_other")},
    "first_to_mean": Items(Maybe(Items(COSINE))), "first_value_norm": Items(Maybe(Items(SIZE))),
}  # fmt: skip
RESULTS = {
    "windows": Items(Maybe(int), least=1),
    "shares": Items(SHARE, least=1),
    "mass": {name: Items(Maybe(Items(Items(SHARE), least=1))) for name in ("all", "without_first")},
    "estimators": {n: {**ESTIMATOR, "errors": Items(Maybe(Items(Items(SIZE), least=1)))} for n in NAMES},
    "ranges": {"value_distance": LAYERS, "logits": LAYERS},
    "geometry": GEOMETRY,
    "methods": Each(METHOD, least=1),
    "top_k_same_keys": Each(ERRORS, least=1),
    "top_k_in_place": Each(ERRORS, least=1),
    "left_out": Each(str),
    "fitted": {"share": SHARE, "pairs": Items(Items(int, exactly=2))},
}
STUDY = {
    "samples": Items({"task": str, "number": int, "tokens": int, "first_token": int}, least=1),
    "tasks": Each(str, least=1),
    "results": RESULTS,
}
STUDY_CONFIG = {"length": int, "samples": int, "rows": int, "centre": int, "ablations": bool}


def check_sampling(results: dict[str, Any]) -> None:
    """Raise Mismatch unless all lists are as long as those that head them; RESULTS is checked before."""
    layers, here = len(results["windows"]), "results"
    if all(window is not None for window in results["windows"]):
        raise Mismatch("results.windows: expected a layer without a window")

    def each(value: Any, where: str, inner: Any = SIZE, heads: int | None = None) -> None:
        """A list for each layer, None for those with a window only."""
        check(value, Items(Maybe(Items(inner, exactly=heads, least=1)), exactly=layers), where)
        for window, layer in zip(results["windows"], value, strict=True):
            if (window is None) != (layer is not None):
                raise Mismatch(f"{where}: expected null for layers with a window, and for no others")

    for name in ("all", "without_first"):
        each(results["mass"][name], f"{here}.mass.{name}", Items(SHARE, exactly=len(results["shares"])))
    for name, mine in results["estimators"].items():
        count = len(mine["budgets"])
        for column in ("read", "mean", "median"):
            check(mine[column], Items(SIZE, exactly=count), f"{here}.estimators.{name}.{column}")
        each(mine["errors"], f"{here}.estimators.{name}.errors", Items(SIZE, exactly=count))
    for name in ("value_distance", "logits"):
        each(results["ranges"][name], f"{here}.ranges.{name}")
    for name, values in results["geometry"].items():
        for column, some in values.items() if isinstance(values, dict) else [("", values)]:
            check(some, Items(Maybe(Items(Number(), least=1)), exactly=layers), f"{here}.geometry.{name}.{column}")
    for group in ("methods", "top_k_same_keys", "top_k_in_place"):
        for label, mine in results[group].items():
            each(mine["errors"], f"{here}.{group}.{label}.errors")
    for label, mine in results["methods"].items():
        check(mine["layer_reads"], Items(Maybe(SIZE), exactly=layers), f"{here}.methods.{label}.layer_reads")
        if mine["method"]["name"] == "magicpig":
            _check_magicpig(results, label, mine)
        elif mine["line"].startswith("magicpig") or not mine["weights"]:
            raise Mismatch(f"{here}.methods.{label}.method.name: expected 'magicpig', got {mine['method']['name']!r}")
    _check_pairs(results)


def _check_magicpig(results: dict[str, Any], label: str, mine: dict[str, Any]) -> None:
    layers, where = len(results["windows"]), f"results.methods.{label}"
    shares = {name: Items(Maybe(Items(SIZE)), exactly=layers) for name in ("sampled_head", "sampled_group")}
    check(mine, {"search": SIZE, "attention": SIZE, "table_share": SIZE, "method": PAIR, **shares}, where)
    if mine["line"] not in (GROUP, OWN, *CONTROLS):
        raise Mismatch(f"{where}.line: expected one of {', '.join((GROUP, OWN, *CONTROLS))}, got {mine['line']!r}")
    bits, tables = (mine["method"][name] for name in ("bits", "tables"))
    if not (1 <= bits <= MOST_BITS and 1 <= tables <= MOST_TABLES):
        raise Mismatch(f"{where}.method: expected bits up to {MOST_BITS} and tables up to {MOST_TABLES}")
    if mine["line"] == GROUP:
        for group in ("top_k_same_keys", "top_k_in_place"):
            if label not in results[group]:
                raise Mismatch(f"results.{group}.{label} is missing")


def _check_pairs(results: dict[str, Any]) -> None:
    """Raise Mismatch unless presets were run in each way, and pairs that were found with both ways to share."""
    if not presets(results):
        raise Mismatch("results.methods: expected a preset of magicpig, also without weights")
    wanted = [(line, *one) for one in presets(results) for line in (OWN, GROUP, *CONTROLS)]
    pairs = results["fitted"]["pairs"]
    wanted += [(line, *one) for one in (*pairs, *((bits, TABLES) for bits in BITS)) for line in (OWN, GROUP) if pairs]
    for line, bits, tables in wanted:
        if label_of(results, line, bits, tables) is None:
            raise Mismatch(f"results.methods: {line} with {bits} bits and {tables} tables is missing")
