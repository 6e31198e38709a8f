"""One softmax over several key sets with linear weights."""

from longreach.ops.mix.api import IMPLEMENTATIONS, KeySet, mix
from longreach.ops.mix.attended import attend_mixed
from longreach.ops.mix.blocks import ATTEND_BLOCKS, BLOCK_IMPLEMENTATIONS, attend_blocks

__all__ = [
    "ATTEND_BLOCKS",
    "BLOCK_IMPLEMENTATIONS",
    "IMPLEMENTATIONS",
    "KeySet",
    "attend_blocks",
    "attend_mixed",
    "mix",
]
