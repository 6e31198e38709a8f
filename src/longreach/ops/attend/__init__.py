"""attend: the one operator, and its passes that keep logits for later ones."""

from longreach.ops.attend.amend import AMEND, Entries, amending, attend_amend
from longreach.ops.attend.api import attend, attend_split, implementations, resolve
from longreach.ops.attend.keeping import (
    FROM_LOGITS,
    SCORE_KEYS,
    WITH_LOGITS,
    attend_keeping,
    attend_values,
    score_keys,
)
from longreach.ops.attend.quantise import copy_keys, quantise_keys
from longreach.ops.attend.score_and_pool import SCORE_AND_POOL, score_and_pool

__all__ = [
    "AMEND",
    "FROM_LOGITS",
    "SCORE_AND_POOL",
    "SCORE_KEYS",
    "WITH_LOGITS",
    "Entries",
    "amending",
    "attend",
    "attend_amend",
    "attend_keeping",
    "attend_split",
    "attend_values",
    "copy_keys",
    "implementations",
    "quantise_keys",
    "resolve",
    "score_and_pool",
    "score_keys",
]
