"""The plans that a session found or made itself, of the methods that were measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from longreach.evals.methods import Spec
from longreach.methods.call import ModelShape
from longreach.runtime import PlanReport, Report


def plans_of(report: Report, spec: Spec, model: ModelShape) -> tuple[PlanReport, ...]:
    """Those that the methods in the prefill and decode slot use. model: the shape of `planned_shape`."""
    makers = (method.plan_maker(model) for method in (spec.prefill, spec.decode))
    kinds = {maker.kind for maker in makers if maker is not None}
    return tuple(plan for plan in report.plans if plan.kind in kinds)


def to_json(plans: Iterable[PlanReport]) -> list[dict[str, Any]]:
    """Each plan once, as records hold it: without its place on this machine. text: as reports show it, without the time
    of hashing, in which sessions that use the same plan differ."""
    placeless = [replace(plan, file=None) for plan in plans]
    return [{**asdict(plan), "text": str(replace(plan, hash_seconds=None))} for plan in dict.fromkeys(placeless)]
