"""sample: keys drawn with known probabilities, as ascending lists with the log-weights that make sums unbiased."""

from longreach.ops.sample.api import DRAW, DRAWING, IMPLEMENTATIONS, SAMPLE, draw, sample
from longreach.ops.sample.draws import uniforms

__all__ = ["DRAW", "DRAWING", "IMPLEMENTATIONS", "SAMPLE", "draw", "sample", "uniforms"]
