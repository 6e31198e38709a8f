"""One softmax over several key sets with linear weights."""

from longreach.ops.mix.api import IMPLEMENTATIONS, KeySet, mix
from longreach.ops.mix.attended import attend_mixed

__all__ = ["IMPLEMENTATIONS", "KeySet", "attend_mixed", "mix"]
