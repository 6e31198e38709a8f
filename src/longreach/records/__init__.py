"""Measured results with everything needed to repeat them."""

from longreach.records.journal import Journal
from longreach.records.record import bootstrap, check_writable, environment, wilson, write

__all__ = ["Journal", "bootstrap", "check_writable", "environment", "wilson", "write"]
