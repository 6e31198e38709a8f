"""generate by longreach's own loop: the decode step is captured in one CUDA graph where the device can."""

from longreach.adapters.transformers.loop.api import Generated, generate

__all__ = ["Generated", "generate"]
