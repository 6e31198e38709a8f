"""append: new keys and values put where they belong."""

from longreach.ops.append.api import IMPLEMENTATIONS, append

__all__ = ["IMPLEMENTATIONS", "append"]
