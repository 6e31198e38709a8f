"""recall: the blocks of keys that rows attend to, by codes of blocks (MKA)."""

from longreach.ops.recall.api import IMPLEMENTATIONS, RECALL, recall
from longreach.ops.recall.codes import KINDS, BlockCode, Kind, Pool, planes_of

__all__ = ["IMPLEMENTATIONS", "KINDS", "RECALL", "BlockCode", "Kind", "Pool", "planes_of", "recall"]
