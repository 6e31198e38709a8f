"""What calibration found out about models, as files: self-describing, checked when loaded, without pickle."""

from longreach.plans.files import load
from longreach.plans.finding import AUTO, NONE, default_file, find, is_automatic, named, shipped, shipped_for
from longreach.plans.kept import FINGERPRINT, NO_FOLDER, Kept, kept
from longreach.plans.plan import KINDS, Made, Plan, PlannedModel, Shape, device_name, how_to_make

__all__ = [
    "AUTO",
    "FINGERPRINT",
    "KINDS",
    "NONE",
    "NO_FOLDER",
    "Kept",
    "Made",
    "Plan",
    "PlannedModel",
    "Shape",
    "default_file",
    "device_name",
    "find",
    "how_to_make",
    "is_automatic",
    "kept",
    "load",
    "named",
    "shipped",
    "shipped_for",
]
