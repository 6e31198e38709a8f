"""across_heads: one score a key for all heads, from the logits of a pass over the keys (OmniKV, LessIsMore)."""

from longreach.ops.across_heads.api import (
    LARGEST,
    LARGEST_LOG_PROB,
    RANK_ROUND_ROBIN,
    RANKING,
    SPREAD_LOGITS,
    SPREADING,
    Ballot,
    largest_log_prob,
    rank_round_robin,
    spread_logits,
)

__all__ = [
    "LARGEST",
    "LARGEST_LOG_PROB",
    "RANKING",
    "RANK_ROUND_ROBIN",
    "SPREADING",
    "SPREAD_LOGITS",
    "Ballot",
    "largest_log_prob",
    "rank_round_robin",
    "spread_logits",
]
