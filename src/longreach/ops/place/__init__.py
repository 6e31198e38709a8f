"""place: stored keys, turned to their positions, and values put where they belong."""

from longreach.ops.place.api import IMPLEMENTATIONS, place

__all__ = ["IMPLEMENTATIONS", "place"]
