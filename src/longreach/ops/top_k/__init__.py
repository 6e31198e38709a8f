"""top_k: the largest scores of long rows, exactly, as ascending lists of columns."""

from longreach.ops.top_k.api import IMPLEMENTATIONS, TOP_K, top_k
from longreach.ops.top_k.pack import IMPLEMENTATIONS as PACKING
from longreach.ops.top_k.pack import PACK, pack_lists

__all__ = ["IMPLEMENTATIONS", "PACK", "PACKING", "TOP_K", "pack_lists", "top_k"]
