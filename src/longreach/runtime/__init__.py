"""A pass over the layers of a model, without any engine: methods, their state, and the bytes they read."""

from longreach.runtime.forward import Pass, attend_layer, drive, note_attended
from longreach.runtime.ledger import Ledger, Pending
from longreach.runtime.report import LayerReport, PlanReport, Report
from longreach.runtime.segments import Segment
from longreach.runtime.state import StateStore

__all__ = [
    "LayerReport",
    "Ledger",
    "Pass",
    "Pending",
    "PlanReport",
    "Report",
    "Segment",
    "StateStore",
    "attend_layer",
    "drive",
    "note_attended",
]
