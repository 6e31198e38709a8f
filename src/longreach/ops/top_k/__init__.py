"""top_k: the largest scores of long rows, exactly, as ascending lists of columns."""

from longreach.ops.top_k.api import TOP_K, implementations, top_k

__all__ = ["TOP_K", "implementations", "top_k"]
