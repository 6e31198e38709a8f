"""Entries of records that several groups have: other kernels, and speeds over the fastest of them."""

from __future__ import annotations

from typing import Any

from longreach.bench.check import require_right
from longreach.bench.competitor import Competitor
from longreach.bench.inputs import Inputs, bytes_needed
from longreach.bench.timing import Timing


def rival_entry(competitor: Competitor, timing: Timing, inputs: Inputs) -> dict[str, Any]:
    """The entry of another kernel; raises WrongResult where its output is wrong."""
    out = competitor.output(competitor.calls[0]())
    return {
        "name": competitor.name,
        "who": competitor.who,
        "settings": {"memory": competitor.memory.label, **competitor.settings},
        **timing.recorded(),
        "tb_per_s": bytes_needed(inputs.case) / timing.median / 1e12,
        "error": require_right(competitor.name, inputs, competitor.memory, competitor.rows, out),
    }


def speeds(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed of each entry of ours over the fastest other kernel; empty if there is none."""
    others = [e for e in entries if e["who"] != "longreach"]
    if not others:
        return {}
    fastest = min(others, key=lambda e: e["microseconds"]["median"])
    time = fastest["microseconds"]["median"]
    ratios = {e["name"]: time / e["microseconds"]["median"] for e in entries if e["who"] == "longreach"}
    return {"kernel": fastest["name"], "ratios": ratios}
