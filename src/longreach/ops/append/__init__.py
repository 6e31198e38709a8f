"""append: new keys and values put where they belong."""

from longreach.ops.append.api import append, implementations

__all__ = ["append", "implementations"]
