"""attend: the one operator."""

from longreach.ops.attend.api import attend, implementations

__all__ = ["attend", "implementations"]
