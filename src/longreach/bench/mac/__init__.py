"""MAC-Attention measured with hits that are forced: its step beside exact kernels, and in a model's compiled loop."""
