"""Measurements of how well attention can be reused: MAC-Attention's figures, from dense runs of prompts.

`gather` reads prompts densely and keeps, of some rows, the nearest earlier query (`matching`) and what its result would
be worth (`amended`); `results` makes the figures' numbers of that (`sweeps`); `drift` decodes with the method itself.
"""
