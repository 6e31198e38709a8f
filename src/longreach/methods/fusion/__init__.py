"""Fusion: the keys and values of precomputed chunks become those of a prompt; some tokens are recomputed."""

from longreach.methods.fusion.dependence import Dependence
from longreach.methods.fusion.full_layer import A3, CacheBlend
from longreach.methods.fusion.position_only import PIE, FullReuse, LegoLink
from longreach.methods.fusion.probe import A3Deep

__all__ = ["A3", "PIE", "A3Deep", "CacheBlend", "Dependence", "FullReuse", "LegoLink"]
