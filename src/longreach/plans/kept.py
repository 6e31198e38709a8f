"""Plans that sessions made of their prompts, kept in the user's cache folder under the fingerprint of the weights.

One file a model and kind, KIND-CONFIG-FINGERPRINT.json (first 12 and 16 hex digits), as `writing` describes it. The
whole fingerprint is in the plan's settings: a renamed or copied file is not taken for a plan of other weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longreach.errors import InvalidInput
from longreach.plans.files import load
from longreach.plans.plan import Plan, Shape

FINGERPRINT = "fingerprint"  # among a plan's settings


@dataclass(frozen=True)
class Kept:
    """plan: None if none fits. path: its place, also before it is there; None if there is no folder for it. ignored:
    why the file there cannot be used. Plans of other weights have places of their own and are not named."""

    plan: Plan | None
    path: Path | None
    ignored: tuple[str, ...] = ()


NO_FOLDER = "this user has no home folder; set HOME, or XDG_CACHE_HOME to an absolute path"


def folder() -> Path | None:
    """The folder of kept plans: longreach/plans in XDG_CACHE_HOME, else in ~/.cache; None for a user without either."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the user is not in the passwd file
        return None
    return cache / "longreach" / "plans"


def kept(kind: str, model: Shape, fingerprint: str, read: Callable[[Plan], object]) -> Kept:
    """The kept plan of a model with these weights. A file that cannot be used is named, and never an error.

    fingerprint: hex digits of all weights, as the adapter hashes them. read: the method's reader, which raises
    InvalidInput for a plan that it cannot use.
    """
    place = folder()
    if place is None:
        return Kept(None, None)
    path = place / f"{kind}-{model.config[:12]}-{fingerprint[:16]}.json"
    try:
        if not path.is_file():
            return Kept(None, path)
    except OSError as error:
        return Kept(None, path, (f"{path.parent} cannot be read: {error.strerror}",))
    try:
        plan = load(path, kind)
        plan.check(model, path.name)
    except InvalidInput as error:
        return Kept(None, path, (str(error),))
    try:
        read(plan)
    except InvalidInput as error:
        return Kept(None, path, (f"{path.name}: {error}",))
    if plan.made.settings.get(FINGERPRINT) != fingerprint:
        return Kept(None, path, (f"{path.name} is of other weights: its fingerprint is another",))
    return Kept(plan, path)
