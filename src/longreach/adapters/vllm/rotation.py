"""The rotation of a model's queries, for methods that match them before rotation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops import RotaryAngles


class Rotation:
    """The rotary embedding of one layer, as vLLM's module holds it: cos and sin of every position, side by side."""

    def __init__(self, module: Any):
        self.table: Tensor = module.cos_sin_cache
        self.neox = bool(module.is_neox_style)

    @classmethod
    def of(cls, model: Any, name: str) -> Rotation:
        """The rotation of an attention layer. name: of its `Attention` in the model.

        Raises Unsupported for a layer whose rotary embedding is not where vLLM's models have it.
        """
        attention = model.get_submodule(name.rpartition(".")[0])
        rotary = getattr(attention, "rotary_emb", None)
        if not hasattr(rotary, "cos_sin_cache") or not hasattr(rotary, "is_neox_style"):
            raise Unsupported(
                f"{name}: expected a rotary embedding in the same module (rotary_emb); use another decode method"
            )
        return cls(rotary)

    def angles(self, pos: Tensor) -> RotaryAngles:
        """The angles of rows at positions [R]."""
        cos, sin = self.table[pos].chunk(2, dim=-1)
        return RotaryAngles(cos, sin, "half" if self.neox else "interleaved")
