"""What calibration found out about models, as files: self-describing, checked when loaded, without pickle."""

from longreach.plans.files import load
from longreach.plans.finding import find, named, shipped, shipped_for
from longreach.plans.plan import KINDS, Made, Plan, PlannedModel, Shape, how_to_make

__all__ = ["KINDS", "Made", "Plan", "PlannedModel", "Shape", "find", "how_to_make", "load", "named", "shipped",
           "shipped_for"]  # fmt: skip
