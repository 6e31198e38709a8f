"""Pure functions over tensors. README.md in this folder fixes letters, layouts and tolerances."""

from longreach.ops import simhash
from longreach.ops.attend import (
    attend,
    attend_from_logits,
    attend_split,
    attend_with_logits,
    copy_keys,
    quantise_keys,
    score_keys,
)
from longreach.ops.mix import mix
from longreach.ops.partial import merge, remove, shift
from longreach.ops.pooled_scores import pooled_scores
from longreach.ops.recall import BlockCode, recall
from longreach.ops.rope import RotaryAngles, RotaryFrequencies, angles, reposition, rotate, unrotate
from longreach.ops.sample import sample, uniforms
from longreach.ops.scan import ScanCarry, scan
from longreach.ops.selection import Bound, Lists, PackedLists, Selection, Span, Spans, absolute, relative
from longreach.ops.tile_lists import RowTiles, TileLists
from longreach.ops.tile_scores import tile_log_sums, tile_scores
from longreach.ops.top_k import pack_lists, top_k
from longreach.ops.types import HeadShard, KVView, Logits, Partial, RowRange, Rows, ScoringKeys
from longreach.ops.variance import sampling_variance

__all__ = [
    "BlockCode",
    "Bound",
    "HeadShard",
    "KVView",
    "Lists",
    "Logits",
    "PackedLists",
    "Partial",
    "RotaryAngles",
    "RotaryFrequencies",
    "RowRange",
    "RowTiles",
    "Rows",
    "ScanCarry",
    "ScoringKeys",
    "Selection",
    "Span",
    "Spans",
    "TileLists",
    "absolute",
    "angles",
    "attend",
    "attend_from_logits",
    "attend_split",
    "attend_with_logits",
    "copy_keys",
    "merge",
    "mix",
    "pack_lists",
    "pooled_scores",
    "quantise_keys",
    "recall",
    "relative",
    "remove",
    "reposition",
    "rotate",
    "sample",
    "sampling_variance",
    "scan",
    "score_keys",
    "shift",
    "simhash",
    "tile_log_sums",
    "tile_scores",
    "top_k",
    "uniforms",
    "unrotate",
]
