"""Measured results with all that is needed to repeat them."""

from longreach.records.journal import Journal
from longreach.records.record import check_writable, environment, wilson, write

__all__ = ["Journal", "check_writable", "environment", "wilson", "write"]
