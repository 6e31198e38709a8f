"""One softmax over several key sets with linear weights."""

from longreach.ops.mix.api import IMPLEMENTATIONS, mix

__all__ = ["IMPLEMENTATIONS", "mix"]
