"""MAC: rows with similar queries reuse results of attention."""

from longreach.methods.mac.method import MAC

__all__ = ["MAC"]
