"""Targets in words."""

from __future__ import annotations

from typing import Any


def goal(target: dict[str, Any]) -> str:
    """What must be reached."""
    over = f" {target['over']}" if target["over"] else ""
    sign = "<=" if target["quantity"] in ("microseconds", "time over") else ">="
    return f"{target['of']}: {target['quantity']}{over} {sign} {target['bound']:g}"


def outcome(target: dict[str, Any]) -> str:
    """What became of it."""
    if target["got"] is None:
        return "not known, a baseline was left out"
    than = f" (against {target['than']})" if target["than"] and not target["over"] else ""
    end = "reached" if target["reached"] else f"missed by {target['missed_by']:.1%}"
    return f"{target['got']:.3g}{than}, {end}"
