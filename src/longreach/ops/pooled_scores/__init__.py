"""pooled_scores: attention probabilities summed over a query group and over the rows of a tile."""

from longreach.ops.pooled_scores.api import IMPLEMENTATIONS, POOLED_SCORES, pooled_scores, resolve

__all__ = ["IMPLEMENTATIONS", "POOLED_SCORES", "pooled_scores", "resolve"]
