"""Which plan a method takes: a file, one that is shipped, or the shipped one for the model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from longreach.errors import InvalidInput
from longreach.plans.files import load
from longreach.plans.plan import Plan, Shape, how_to_make

SUFFIX = ".json"
AUTO = "auto"  # made of a session's first prompt, or kept from an earlier session
NONE = "none"  # the shipped one, and no automatic one


def shipped(kind: str) -> dict[str, Path]:
    """Plans of a kind that come with longreach: name -> file.

    KIND-MODEL is the default plan of a model, and KIND-MODEL-VARIANT another one, which is used by name only.
    """
    folder = Path(str(files("longreach") / "plans" / "shipped"))
    return {path.stem: path for path in sorted(folder.glob(f"{kind}-*{SUFFIX}"))}


def default_file(kind: str, model: Shape) -> Path | None:
    """The file of the default plan that is shipped for a model of this configuration, else None."""
    fit = [path for path in shipped(kind).values() if load(path, kind).model.config == model.config]
    return min(fit, key=lambda path: len(path.stem), default=None)  # the names of variants are longer


def shipped_for(kind: str, model: Shape) -> Plan | None:
    """The default plan of a kind that is shipped for a model of this configuration, else None."""
    path = default_file(kind, model)
    if path is None:
        return None
    found = load(path, kind)
    found.check(model, f"the plan {path.stem}")
    return found


def find(kind: str, plan: str | None, model: Shape) -> Plan:
    """The plan for a model, checked to be for it.

    plan: a path (to a .json file), the name of a shipped plan, or None or NONE for the one that is shipped for this
    model.
    Raises InvalidInput where there is none, it is broken, or for another model; for AUTO, as no plan is made here.
    """
    known = shipped(kind)
    if plan == AUTO:
        raise InvalidInput(
            f"plan={AUTO}: plans for kascade and loki are made of a prompt, by sessions of attach and generate; {kind} "
            f"needs one here without; {how_to_make(kind)} and give plan=plan.json"
        )
    if plan in (None, NONE):
        mine = shipped_for(kind, model)
        if mine is not None:
            return mine
        raise InvalidInput(
            f"no {kind} plan is shipped for this model (hash of its configuration: {model.config[:12] or 'unknown'}; "
            f"shipped: {', '.join(known) or 'none'}); {how_to_make(kind)} and give plan=plan.json"
        )
    found = load(named(kind, plan), kind)
    found.check(model, f"the plan {plan}")
    return found


def is_automatic(kind: str, plan: str | None, model: Shape) -> bool:
    """Whether an option `plan` leaves it to a session to make the plan: AUTO, or None if none is shipped."""
    return plan == AUTO or (plan is None and shipped_for(kind, model) is None)


def named(kind: str, plan: str) -> Path:
    """The file of a plan that is given by path or shipped name. Raises InvalidInput where there is none."""
    known = shipped(kind)
    if plan in known:
        return known[plan]
    path = Path(plan)
    if not path.is_file():
        raise InvalidInput(
            f"no plan {plan!r}: neither a file nor one of the shipped {kind} plans ({', '.join(known) or 'none'}); "
            f"check the path"
        )
    return path
