"""recall: the blocks of keys that rows attend to, by codes of blocks (MKA)."""

from longreach.ops.recall.api import (
    CODE_COMPLETED,
    CODE_ROWS,
    CODING,
    IMPLEMENTATIONS,
    RECALL,
    code_blocks,
    code_completed,
    code_places,
    code_rows,
    code_view,
    recall,
)
from longreach.ops.recall.attending import (
    ATTEND_SUMMARIES,
    ATTENDING,
    RECALL_AND_ATTEND,
    attend_summaries,
    recall_and_attend,
)
from longreach.ops.recall.codes import KINDS, BlockCode, Kind, Pool, check_bits, code_width, planes_of, signs

__all__ = [
    "ATTENDING",
    "ATTEND_SUMMARIES",
    "CODE_COMPLETED",
    "CODE_ROWS",
    "CODING",
    "IMPLEMENTATIONS",
    "KINDS",
    "RECALL",
    "RECALL_AND_ATTEND",
    "BlockCode",
    "Kind",
    "Pool",
    "attend_summaries",
    "check_bits",
    "code_blocks",
    "code_completed",
    "code_places",
    "code_rows",
    "code_view",
    "code_width",
    "planes_of",
    "recall",
    "recall_and_attend",
    "signs",
]
