"""What methods keep of every token, or of blocks of them: memory beside the cache's own, which grows along with it."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.cache.kv import NothingToForget
from longreach.ops.types import require


class PerSlot(NothingToForget):
    """Tensors [slots, G, units, width], a unit for every `per` tokens of a sequence; a method's SequenceState.

    Laid out as contiguous K is, slot s being page s: bounds of blocks, 8-bit keys, codes. A method writes the units of
    new tokens when they are appended and reads none past those a sequence holds. What was never written may be
    anything.

    moved: how often the memory has been replaced; what was captured in a graph before then reads the old one.
    """

    def __init__(self, slots: int, heads: int, per: int = 1, *, device: torch.device, **kept: tuple[int, torch.dtype]):
        """kept: name -> (width, dtype) of each tensor."""
        require(min(slots, heads, per) >= 1, f"expected slots, heads and tokens a unit >= 1, got {slots, heads, per}")
        self.per, self.moved = per, 0
        like = torch.empty(0, device=device)
        self._kept = {n: like.new_empty((slots, heads, 0, w), dtype=dtype) for n, (w, dtype) in kept.items()}

    def __getitem__(self, name: str) -> Tensor:
        """[slots, G, units, width], where it lies now."""
        return self._kept[name]

    @property
    def units(self) -> int:
        return next(iter(self._kept.values())).shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.numel() * x.element_size() for x in self._kept.values())

    def fit(self, tokens: int) -> None:
        """Make room for sequences of `tokens` tokens, twice what there is if it grows at all. Not within a capture.

        To be called with the capacity of each pass's view: captured passes have the view of those before them.
        """
        units = -(-tokens // self.per)
        if units <= self.units:
            return
        self.moved += self.units > 0
        size = max(units, 2 * self.units)
        with torch.inference_mode(False), torch.no_grad():  # it outlives the mode this pass runs in
            for name, old in self._kept.items():
                new = old.new_empty((*old.shape[:2], size, old.shape[3]))
                new[:, :, : old.shape[2]] = old
                self._kept[name] = new

    def zero(self) -> None:
        """Fill all of it with zeros."""
        for x in self._kept.values():
            x.zero_()
