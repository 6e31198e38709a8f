"""Fusion measured: chunks of a task's prompts, controls that no user needs, and what reuse changes in the model."""

from longreach.evals.fusion.chunks import BEHIND, Behind, FusedPrompts
from longreach.evals.fusion.controls import CONTROLS, Oracle, RandomChoice, RowOrder

__all__ = ["BEHIND", "CONTROLS", "Behind", "FusedPrompts", "Oracle", "RandomChoice", "RowOrder"]
