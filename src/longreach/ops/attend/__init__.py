"""attend: the one operator, and its passes that keep logits for later ones."""

from longreach.ops.attend.amend import AMEND, AMEND_IMPLEMENTATIONS, Entries, attend_amend
from longreach.ops.attend.api import IMPLEMENTATIONS, attend, attend_split, prepare, resolve
from longreach.ops.attend.quantise import copy_keys, quantise_keys
from longreach.ops.attend.score_and_pool import SCORE_AND_POOL, score_and_pool
from longreach.ops.attend.two_pass import (
    FROM_LOGITS,
    SCORE_KEYS,
    WITH_LOGITS,
    attend_from_logits,
    attend_with_logits,
    score_keys,
)

__all__ = [
    "AMEND",
    "AMEND_IMPLEMENTATIONS",
    "FROM_LOGITS",
    "IMPLEMENTATIONS",
    "SCORE_AND_POOL",
    "SCORE_KEYS",
    "WITH_LOGITS",
    "Entries",
    "attend",
    "attend_amend",
    "attend_from_logits",
    "attend_split",
    "attend_with_logits",
    "copy_keys",
    "prepare",
    "quantise_keys",
    "resolve",
    "score_and_pool",
    "score_keys",
]
