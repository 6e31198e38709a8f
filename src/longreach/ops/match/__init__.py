"""nearest: match of queries against a ring of earlier ones."""

from longreach.ops.match.api import IMPLEMENTATIONS, MATCH, match, nearest
from longreach.ops.match.reference import recovered
from longreach.ops.match.ring import DEEPEST, Ring
from longreach.ops.match.rule import DEPTHS, NOTES, Matched, Nearest, Rule, tie

__all__ = [
    "DEEPEST",
    "DEPTHS",
    "IMPLEMENTATIONS",
    "MATCH",
    "NOTES",
    "Matched",
    "Nearest",
    "Ring",
    "Rule",
    "match",
    "nearest",
    "recovered",
    "tie",
]  # fmt: skip
