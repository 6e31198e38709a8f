"""Fusion: the keys and values of precomputed chunks become those of a prompt; some tokens are recomputed."""

from longreach.methods.fusion.base import FullLayer, Fusion, PromptParts
from longreach.methods.fusion.full_layer import A3, CacheBlend
from longreach.methods.fusion.position_only import PIE, FullReuse, LegoLink

__all__ = ["A3", "PIE", "CacheBlend", "FullLayer", "FullReuse", "Fusion", "LegoLink", "PromptParts"]
