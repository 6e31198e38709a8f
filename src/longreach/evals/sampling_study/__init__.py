"""Sampling of attention: mass of the best keys, estimators with exact scores, geometry of keys, methods, error bars."""

from longreach.evals.sampling_study.error_bars import ErrorBarStudy
from longreach.evals.sampling_study.study import SamplingStudy

__all__ = ["ErrorBarStudy", "SamplingStudy"]
