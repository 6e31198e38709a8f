"""MagicPIG: attention over keys sampled by locality-sensitive hashing (Chen et al., 2024, arXiv 2410.16179)."""

from longreach.methods.magicpig.method import PRESETS, MagicPIG

__all__ = ["PRESETS", "MagicPIG"]
