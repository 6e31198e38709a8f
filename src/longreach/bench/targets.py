"""Whether a case reached its targets, and by how much it missed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from longreach.bench.case import PREFILLS, WITHOUT_ATTENTION, Case, Target
from longreach.errors import InvalidInput

RIVALS = ("flashinfer", "flash_attention_3")  # the faster of them is what attend's speed is compared with
WHOSE = (*RIVALS, "torch_sdpa")


def judge(case: Case, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The result for each target, from entries of one run: {**target, "got", "than", "reached", "missed_by"}.

    missed_by: share of the bound, 0 where reached. got is None where the entry, or what it is compared with, is left
    out or not measured yet.
    """
    return [_judged(target, entries) for target in case.targets]


def _judged(target: Target, entries: list[dict[str, Any]]) -> dict[str, Any]:
    ours = {e["name"]: e for e in entries if e["who"] == "longreach"}
    if target.quantity == "best tokens/s":
        return _result(target, *_most_tokens(target, entries))
    if target.quantity == "peak memory over":
        return _result(target, *_peak_over(target, {e["name"]: e for e in entries}))
    if target.of not in ours or (target.quantity in ("speed over", "time over") and target.over not in {*WHOSE, *ours}):
        return _result(target, None, None)
    mine = ours[target.of]
    time, than, got = mine["microseconds"]["median"], None, None
    if target.quantity == "speed over fastest":
        rivals = [e for e in entries if e["who"] != "longreach"]
        if {e["who"] for e in rivals} >= {*RIVALS, "torch_sdpa"}:
            got, than = _faster(rivals, time)
    elif target.quantity == "speed over" and target.over in WHOSE:
        rivals = [e for e in entries if e["who"] == target.over]
        if rivals:
            got, than = _faster(rivals, time)
    elif target.quantity == "speed over baseline":
        rivals = [e for e in entries if e["who"] in RIVALS]
        if {e["who"] for e in rivals} == set(RIVALS):  # the faster of both, or nothing
            got, than = _faster(rivals, time)
    elif target.quantity == "speed over prefill":
        exact = [e for e in entries if e["name"] in PREFILLS]
        if len(exact) == len(PREFILLS):
            got, than = _faster(exact, time)
    elif target.quantity in ("speed over", "time over"):
        than = str(target.over)
        other = ours[than]["microseconds"]["median"]
        got = other / time if target.quantity == "speed over" else time / other
    elif target.quantity == "attention speed over":
        than = str(target.over)
        if than in ours and WITHOUT_ATTENTION in ours:
            other, rest = (ours[name]["microseconds"]["median"] for name in (than, WITHOUT_ATTENTION))
            got = (other - rest) / (time - rest)
    elif target.quantity == "microseconds":
        got = time
    elif target.quantity == "TB/s":
        got = mine["tb_per_s"]
    elif target.quantity == "% of KV" and "ring_percent_of_kv" in mine:
        got = mine["ring_percent_of_kv"]
    elif target.quantity == "% of KV held" and "kv_percent" in mine:
        got = mine["kv_percent"]
    elif target.quantity == "% of dense" and "percent_of_dense" in mine:
        got = mine["percent_of_dense"]
    elif target.quantity == "mass of chosen keys" and "mass_of_chosen" in mine:
        got = mine["mass_of_chosen"]
    elif target.quantity == "ms of choosing" and "settings" in mine:  # measured after its time, on a GPU alone
        got = mine["settings"].get("milliseconds", {}).get("choose")
    elif target.quantity == "slowest step over median" and "slowest" in mine:
        got = mine["slowest"]["over_median"]
    elif target.quantity == "share of limit" and "share_of_limit" in mine:
        got = mine["share_of_limit"]
    else:
        raise InvalidInput(f"target: {target.quantity} is not measured by this case")
    return _result(target, got, than)


def _most_tokens(target: Target, entries: list[dict[str, Any]]) -> tuple[float | None, str | None]:
    """The most tokens a second of the entries whose names begin with `of`, and the entry's name."""
    some = [e for e in entries if e["name"].startswith(target.of)]
    best = max(some, key=lambda e: float(e["tokens_per_second"]), default=None)
    return (None, None) if best is None else (best["tokens_per_second"], best["name"])


def _peak_over(target: Target, entries: dict[str, dict[str, Any]]) -> tuple[float | None, str | None]:
    """Peak memory over that of another entry, in the phase with the larger ratio; None if one was not measured."""
    both = [entries.get(name or "", {}).get("memory", {}) for name in (target.of, target.over)]
    phases = ("peak",) if all("peak" in memory for memory in both) else ("prefill_peak", "decode_peak")
    mine, other = ([memory.get(phase) for phase in phases] for memory in both)
    if None in (*mine, *other):
        return None, None
    return max(a / b for a, b in zip(mine, other, strict=True)), target.over


def _result(target: Target, got: float | None, than: str | None) -> dict[str, Any]:
    if got is None:
        return {**asdict(target), "got": None, "than": None, "reached": None, "missed_by": None}
    short = (target.bound - got if target.least else got - target.bound) / target.bound
    return {**asdict(target), "got": got, "than": than, "reached": short <= 0, "missed_by": max(0.0, short)}


def _faster(rivals: list[dict[str, Any]], time: float) -> tuple[float, str]:
    """Speed over the fastest rival, and that rival."""
    fastest = min(rivals, key=lambda e: e["microseconds"]["median"])
    return fastest["microseconds"]["median"] / time, fastest["name"]
