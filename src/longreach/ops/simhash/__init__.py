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
from longreach.ops.simhash.probability import inclusion
from longreach.ops.simhash.tables import HashTables, projections

__all__ = [
    "BUILD",
    "CODES",
    "COLLIDE",
    "SEAL",
    "WEIGH",
    "Collisions",
    "HashTables",
    "Weights",
    "build",
    "codes",
    "collide",
    "inclusion",
    "projections",
    "seal",
    "weigh",
]
