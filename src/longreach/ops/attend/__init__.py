"""attend: the one operator, and its passes that keep logits for later ones."""

from longreach.ops.attend.amend import Entries, amending, attend_amend
from longreach.ops.attend.api import attend, attend_split, implementations, resolve
from longreach.ops.attend.keeping import attend_keeping, attend_values, score_keys
from longreach.ops.attend.quantise import copy_keys, quantise_keys

__all__ = [
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
    "score_keys",
]
