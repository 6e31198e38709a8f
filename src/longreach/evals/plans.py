"""The plans that a session found or made itself, of the methods that were measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from longreach.evals.methods import Spec
from longreach.runtime import PlanReport, Report


def plans_of(report: Report, spec: Spec) -> tuple[PlanReport, ...]:
    """Those of the methods that fill the prefill and the decode slot."""
    kinds = (spec.prefill.name, spec.decode.name)
    return tuple(plan for plan in report.plans if plan.kind in kinds)


def to_json(plans: Iterable[PlanReport]) -> list[dict[str, Any]]:
    """Each plan once, as records hold it; text: as reports show it."""
    return [{**asdict(plan), "text": str(plan)} for plan in dict.fromkeys(plans)]
