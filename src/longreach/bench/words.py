"""Targets in words."""

from __future__ import annotations

from typing import Any


def goal(target: dict[str, Any]) -> str:
    """What must be reached."""
    over = f" {target['over']}" if target["over"] else ""
    sign = "<=" if target["quantity"] in ("microseconds", "time over") else ">="
    return f"{target['of']}: {target['quantity']}{over} {sign} {target['bound']:g}"


def rate(entry: dict[str, Any]) -> str:
    """What a competitor did in a second: bytes read, or in prefill operations."""
    flops = entry.get("tflop_per_s")
    return f"{entry['tb_per_s']:.2f} TB/s" if flops is None else f"{flops:.0f} TFLOP/s"


def outcome(target: dict[str, Any]) -> str:
    """What became of it."""
    if target["got"] is None:
        return "not known, a baseline was left out"
    than = f" (against {target['than']})" if target["than"] and not target["over"] else ""
    end = "reached" if target["reached"] else f"missed by {target['missed_by']:.1%}"
    return f"{target['got']:.3g}{than}, {end}"
