"""Checks of a plan beyond those of its method: no unused values, only possible numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.plans import Plan

VALUES = {  # kind of plan -> the values that it may have
    "kascade": ("anchors", "head_map", "layers", "k", "tile", "ranks", "weighted", "dense_below"),
    "loki": (),
    "mac": ("window", "band", "tau", "alpha", "epsilon", "widest", "sinks", "bands", "mass", "windows", "accepted",
            "taken"),
    "magicpig": ("bits", "tables", "seed", "least", "share", "sinks", "local", "seal", "centre", "budget", "memory",
                 "length", "element", "layers", "pairs"),
    "a3_deep": ("layer", "layers", "ratio", "kl", "hits"),
}  # fmt: skip
ROUNDING = 1e-5  # of fp32 sums
HELP = "take an undamaged copy, or calibrate again"


def check(plan: Plan) -> None:
    """Raise InvalidInput for values of another name, and numbers that no calibration gives."""
    known = VALUES.get(plan.kind)
    for name in plan.values:
        if known is not None and name not in known:
            raise InvalidInput(
                f"the plan has the unknown value {name!r}; known of {plan.kind} are: {', '.join(known) or 'none'}; "
                f"{HELP}"
            )
    if plan.kind == "kascade":
        _check_kascade(plan)


def _check_kascade(plan: Plan) -> None:
    for name in ("anchors", "layers"):
        numbers: Any = plan.values.get(name)
        strange = [n for n in numbers if type(n) is not int or n < 0] if isinstance(numbers, list) else []
        if strange:
            raise InvalidInput(f"{name}: expected layer numbers, whole and from 0 on, got {strange[0]!r}; {HELP}")
    ranks, heads = plan.values.get("ranks", 1), plan.model.kv_heads
    if type(ranks) is not int or ranks < 1 or heads % ranks:
        raise InvalidInput(f"ranks: expected a number that divides the {heads} KV heads, got {ranks!r}; {HELP}")
    for name, most in (("similarity", 1), ("importance", 2)):
        x = plan.arrays.get(name)
        if x is None or not x.numel():
            continue
        low, high = float(x.min()), float(x.max())
        if low < -ROUNDING or high > most + ROUNDING:
            came = f"{low:.6g} to {high:.6g}"
            raise InvalidInput(f"array {name!r}: expected numbers in [0, {most}], got {came}; {HELP}")
