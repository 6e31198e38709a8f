"""Training of models converted to MKA: healing by distillation, the trained index of blocks, distance to the original.

`data` makes training sequences, `heal` trains, `index` distils `recall="index"`, `shares` measures what each way of
recall finds, `distance` compares a model with its original.
"""
