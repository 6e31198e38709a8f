"""Measured results with all that is needed to repeat them."""

from longreach.records.record import environment, wilson, write

__all__ = ["environment", "wilson", "write"]
