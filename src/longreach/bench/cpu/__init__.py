"""Measurements of decoding on a CPU: MagicPIG's attention step by itself, and tokens of the shipped model."""
