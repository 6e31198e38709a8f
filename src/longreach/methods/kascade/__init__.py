"""Kascade: exact top-k keys in a few anchor layers, reused through a head map in the layers after each."""

from longreach.methods.kascade.method import Kascade

__all__ = ["Kascade"]
