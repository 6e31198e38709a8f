"""block_bounds: channel-wise bounds of blocks of keys, and upper bounds of their scores (Quest)."""

from longreach.ops.block_bounds.api import (
    BOUND_AND_SCORE,
    BOUNDING,
    SCORING,
    bound_and_score,
    bound_blocks,
    bound_newest,
    score_blocks,
    units_per_page,
)

__all__ = [
    "BOUNDING",
    "BOUND_AND_SCORE",
    "SCORING",
    "bound_and_score",
    "bound_blocks",
    "bound_newest",
    "score_blocks",
    "units_per_page",
]
