"""pooled_scores: attention probabilities summed over a query group and over the rows of a tile."""

from longreach.ops.pooled_scores.api import POOLED_SCORES, implementations, pooled_scores, resolve

__all__ = ["POOLED_SCORES", "implementations", "pooled_scores", "resolve"]
