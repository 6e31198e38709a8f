"""Kascade's state of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from longreach.cache import StatelessOnTruncate
from longreach.methods.kascade.quantised_keys import QuantisedKeys
from longreach.methods.kascade.role import LayerRole
from longreach.ops import KVView


@dataclass(frozen=True)
class KascadeState(StatelessOnTruncate):
    """role: the layer's role in the plan. copy: the 8-bit keys that an anchor scores, else None."""

    role: LayerRole
    copy: QuantisedKeys | None = None

    def written(self, layer: int, view: KVView, seq: Tensor, slot: Tensor) -> None:
        """Quantise these keys again."""
        if self.copy is not None:
            self.copy.written(layer, view, seq, slot)

    def kept(self, layer: int, view: KVView) -> None:
        """Quantise all keys again."""
        if self.copy is not None:
            self.copy.kept(layer, view)

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> KascadeState:
        copy = None if self.copy is None else self.copy.select(slots, pages)
        assert copy is None or isinstance(copy, QuantisedKeys)
        return KascadeState(self.role, copy)

    def to_save(self) -> dict[str, Tensor]:
        """Nothing: the role comes from the plan, and `kept` quantises all keys again."""
        return {}

    @property
    def generation(self) -> int:
        """Changes when memory is replaced: a captured step reads the old memory."""
        return 0 if self.copy is None else self.copy.generation

    @property
    def nbytes(self) -> int:
        held = self.role.head_map
        return (0 if held is None else held.nbytes) + (0 if self.copy is None else self.copy.nbytes)
