"""Measured results with all that is needed to repeat them."""

from longreach.records.record import check_writable, environment, wilson, write

__all__ = ["check_writable", "environment", "wilson", "write"]
