"""What sparse attention depends on, measured on a model: sinks, recency, heavy keys, retrieval heads, reuse."""

from longreach.evals.attention.measure import Attention

__all__ = ["Attention"]
