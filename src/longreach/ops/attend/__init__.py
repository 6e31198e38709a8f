"""attend: the one operator."""

from longreach.ops.attend.api import attend, attend_split, implementations, resolve

__all__ = ["attend", "attend_split", "implementations", "resolve"]
