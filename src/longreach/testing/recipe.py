"""A shape of longreach-mini small enough to train for a moment on a CPU."""

from __future__ import annotations

from longreach.train.mini.config import ModelShape

SHAPE = ModelShape(
    vocab_size=2000,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=1024,
)
