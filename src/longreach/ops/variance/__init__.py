"""The variance of attention's output over the random choice of its keys, from the chosen keys alone."""

from longreach.ops.variance.api import IMPLEMENTATIONS, SAMPLING_VARIANCE, sampling_variance

__all__ = ["IMPLEMENTATIONS", "SAMPLING_VARIANCE", "sampling_variance"]
