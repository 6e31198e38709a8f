"""MAC-Attention timed with forced hits: its step against exact kernels, and in a model's compiled loop."""
