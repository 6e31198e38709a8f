"""Plans as users name them, and the modules of each kind."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.plan.checks import check
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.plans import Plan

VIEWS = {  # kind of plan -> what reads it as its method does, and raises InvalidInput for what does not fit
    "kascade": "longreach.methods.kascade.calibration_result:CalibrationResult.of",
    "loki": "longreach.methods.loki.plan:LokiPlan.of",
    "mac": "longreach.methods.mac.plan:MACPlan.of",
    "magicpig": "longreach.methods.magicpig.plan:MagicPIGPlan.of",
    "a3_deep": "longreach.methods.fusion.plan:A3DeepPlan.of",
}
SHOWN = {  # kind of plan -> the module that shows it: `about(plan)`, JSON, and `show(plan, out)`
    "kascade": "longreach.cli.plan.kascade",
    "loki": "longreach.cli.plan.loki",
    "mac": "longreach.cli.plan.mac",
    "magicpig": "longreach.cli.plan.magicpig",
    "a3_deep": "longreach.cli.plan.a3_deep",
}


def add_plan(parser: argparse.ArgumentParser, name: str = "plan") -> None:
    """PLAN."""
    parser.add_argument(name, metavar="PLAN", help="a plan's file, or the name of one that is shipped")


def located(name: str) -> tuple[Path, str]:
    """(file, kind) of a plan by path or shipped name. Raises InvalidInput if there is none, or it has no kind."""
    from longreach.plans import KINDS, shipped

    known = {stem: path for kind in KINDS for stem, path in shipped(kind).items()}
    path = known.get(name, Path(name))
    if not path.is_file():
        raise InvalidInput(
            f"no plan {name!r}: neither a file nor one of the shipped plans ({', '.join(known) or 'none'}); check the "
            f"path"
        )
    return path, _kind(path)


def _kind(path: Path) -> str:
    """The kind in the file; errors of a file that is not a plan come from loading it."""
    from longreach.plans import KINDS

    try:
        kind = json.loads(path.read_bytes())["kind"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return KINDS[0]
    return kind if kind in KINDS else KINDS[0]


def opened(name: str) -> Plan:
    """The plan by path or shipped name, checked as its method checks it."""
    from longreach.plans import load

    plan = load(*located(name))
    view(plan)
    return plan


def view(plan: Plan) -> Any:
    """What a method makes of a plan, which must be whole; None for kinds that have no view of their own."""
    place = VIEWS.get(plan.kind)
    if place is None:
        return None
    check(plan)
    module, _, attribute = place.partition(":")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found(plan)
