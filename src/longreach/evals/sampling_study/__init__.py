"""Sampling of attention: mass of the best keys, estimators with exact scores, geometry of keys, methods."""

from longreach.evals.sampling_study.study import SamplingStudy

__all__ = ["SamplingStudy"]
