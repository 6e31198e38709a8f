"""Loki: keys chosen by their scores in a few directions, which calibration finds."""

from longreach.methods.loki.method import Loki

__all__ = ["Loki"]
