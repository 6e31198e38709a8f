"""simhash: keys sampled by locality-sensitive hashing, with the probability of each (MagicPIG)."""

from longreach.ops.simhash.api import (
    BUILD,
    CODES,
    COLLIDE,
    SEAL,
    WEIGH,
    Collisions,
    Weights,
    build,
    codes,
    collide,
    seal,
    weigh,
)
from longreach.ops.simhash.attention import ATTEND_SAMPLED, NUMBERS, SampledAttention, attend_sampled
from longreach.ops.simhash.probability import inclusion
from longreach.ops.simhash.tables import HashTables, projections

__all__ = [
    "ATTEND_SAMPLED",
    "BUILD",
    "CODES",
    "COLLIDE",
    "NUMBERS",
    "SEAL",
    "WEIGH",
    "Collisions",
    "HashTables",
    "SampledAttention",
    "Weights",
    "attend_sampled",
    "build",
    "codes",
    "collide",
    "inclusion",
    "projections",
    "seal",
    "weigh",
]
