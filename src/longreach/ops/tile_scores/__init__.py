"""tile_scores: attention probabilities of the keys before a tile of prompt rows, summed over its rows and heads."""

from longreach.ops.tile_scores.api import (
    IMPLEMENTATIONS,
    LOG_SUMS,
    TILE_LOG_SUMS,
    TILE_SCORES,
    tile_log_sums,
    tile_scores,
)

__all__ = ["IMPLEMENTATIONS", "LOG_SUMS", "TILE_LOG_SUMS", "TILE_SCORES", "tile_log_sums", "tile_scores"]
