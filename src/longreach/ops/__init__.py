"""Pure functions over tensors. README.md beside this file fixes letters, layouts and tolerances."""

from longreach.ops.attend import (
    attend,
    attend_keeping,
    attend_split,
    attend_values,
    copy_keys,
    quantise_keys,
    score_keys,
)
from longreach.ops.partial import merge, remove, shift
from longreach.ops.pooled_scores import pooled_scores
from longreach.ops.rope import Turn, angles, reposition, rotate, unrotate
from longreach.ops.selection import Bound, Lists, PackedLists, Selection, Span, Spans, at, near
from longreach.ops.top_k import top_k
from longreach.ops.types import HeadShard, KVView, Logits, Partial, Rows, Run, ScoringKeys

__all__ = [
    "Bound",
    "HeadShard",
    "KVView",
    "Lists",
    "Logits",
    "PackedLists",
    "Partial",
    "Rows",
    "Run",
    "ScoringKeys",
    "Selection",
    "Span",
    "Spans",
    "Turn",
    "angles",
    "at",
    "attend",
    "attend_keeping",
    "attend_split",
    "attend_values",
    "copy_keys",
    "merge",
    "near",
    "pooled_scores",
    "quantise_keys",
    "remove",
    "reposition",
    "rotate",
    "score_keys",
    "shift",
    "top_k",
    "unrotate",
]
