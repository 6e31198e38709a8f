"""nearest: match of queries against a ring of earlier ones."""

from longreach.ops.nearest.api import MATCH, implementations, match, nearest
from longreach.ops.nearest.reference import recovered
from longreach.ops.nearest.ring import DEEPEST, Ring
from longreach.ops.nearest.rule import DEPTHS, NOTES, Matched, Nearest, Rule, tie

__all__ = [
    "DEEPEST", "DEPTHS", "MATCH", "NOTES", "Matched", "Nearest", "Ring", "Rule", "implementations", "match", "nearest",
    "recovered", "tie",
]  # fmt: skip
