"""A model's properties that sparse attention depends on: sinks, recency, heavy keys, retrieval heads, reuse."""

from longreach.evals.attention.measure import Attention

__all__ = ["Attention"]
