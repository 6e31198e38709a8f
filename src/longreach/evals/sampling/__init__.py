"""Sampling of attention measured: its mass, estimators with exact scores, geometry of keys, and the library's methods."""

from longreach.evals.sampling.study import SamplingStudy

__all__ = ["SamplingStudy"]
