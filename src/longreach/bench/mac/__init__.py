"""MAC-Attention timed with forced hits: its step beside exact kernels, and in a model's compiled loop."""
