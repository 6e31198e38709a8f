"""generate by longreach's own loop: the decode step is captured in CUDA graphs where the device can."""

from longreach.adapters.transformers.loop.api import Generated, generate

__all__ = ["Generated", "generate"]
