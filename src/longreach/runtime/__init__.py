"""A pass over the layers of a model, without any engine: who attends, what methods keep, and what was read."""

from longreach.runtime.forward import Pass, Segment, attend_layer, drive
from longreach.runtime.ledger import Ledger
from longreach.runtime.report import LayerReport, Report
from longreach.runtime.state import StateStore

__all__ = ["LayerReport", "Ledger", "Pass", "Report", "Segment", "StateStore", "attend_layer", "drive"]
