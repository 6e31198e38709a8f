"""Methods whose plan a session makes of its first prompt.

A session gives its methods a ModelShape with `plans`. A method whose plan is still to be made gets `AwaitsPlan` as
state and attends densely. `PlanRows` observes the prompt. Before the first decode step the method's `PlanMaker` makes
the plan of these rows and of the keys in the cache; StateStore then gives the method its own state.
"""

from __future__ import annotations

from dataclasses import dataclass

from longreach.cache import StatelessOnTruncate
from longreach.methods.call import ModelShape, SessionPlans
from longreach.plans import Plan, find, is_automatic


class AutomaticPlans:
    """The plans of a session by kind, and why a kind has none yet. It belongs to the session."""

    def __init__(self) -> None:
        self._made: dict[str, Plan] = {}
        self.reasons: dict[str, str] = {}

    def get(self, kind: str) -> Plan | None:
        return self._made.get(kind)

    def put(self, plan: Plan) -> None:
        self._made[plan.kind] = plan

    def reason(self, kind: str) -> str:
        return self.reasons.get(kind, f"no {kind} plan yet: it is calibrated on this prompt")


def plan_for(kind: str, name: str | None, model: ModelShape) -> Plan | None:
    """The plan for an option `plan`; None while a session waits for a prompt to make it of.

    Raises as `plans.find`, also where a plan would have to be made and no session can (`ModelShape.plans` is None).
    """
    if model.plans is not None and is_automatic(kind, name, model):
        return model.plans.get(kind)
    return find(kind, name, model)


@dataclass(frozen=True, eq=False)
class AwaitsPlan(StatelessOnTruncate):
    """The state of a layer whose method has no plan yet. StateStore replaces it once there is one."""

    kind: str
    plans: SessionPlans

    @classmethod
    def of(cls, kind: str, model: ModelShape) -> AwaitsPlan:
        """The state where `plan_for` returned None."""
        assert model.plans is not None
        return cls(kind, model.plans)

    @property
    def ready(self) -> bool:
        """Whether the plan has been made."""
        return self.plans.get(self.kind) is not None

    @property
    def reason(self) -> str:
        """Why the method attends densely."""
        return self.plans.reason(self.kind)

    @property
    def generation(self) -> int:
        """Changes when the plan is made: a step captured before attends densely."""
        return int(self.ready)
