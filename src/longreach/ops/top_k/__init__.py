"""top_k: the largest scores of long rows, exactly, as ascending lists of columns."""

from longreach.ops.top_k.api import IMPLEMENTATIONS, TOP_K, top_k

__all__ = ["IMPLEMENTATIONS", "TOP_K", "top_k"]
