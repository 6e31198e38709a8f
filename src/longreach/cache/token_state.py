"""State of methods for each token or block of tokens: stored page by page like a layer's keys."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.cache.state import StatelessOnTruncate
from longreach.ops.types import KVView, require

AT_ONCE = 1 << 26  # numbers of keys from which units are computed at a time


class PerTokenState(StatelessOnTruncate, ABC):
    """Tensors [P, G, units, width] (or [P, G, units]) for one layer: their page p belongs to page p of K and V.

    A unit describes `per` consecutive slots of a sequence: bounds of a block, an 8-bit key, a code. It lies in the page
    of its first slot, which the view's block table finds. So pages may move between sequences, and sequences may share
    pages if `per` divides the page size; `StateStore(shared_pages=True)` checks that. Units past a sequence's last
    slot are never read and may hold anything.
    """

    def __init__(self, kv: KVView, per: int = 1, **kept: tuple[int | None, torch.dtype]):
        """kept: name -> (width, dtype) of each tensor; width None: no last dimension."""
        require(per >= 1, f"expected slots a unit >= 1, got {per}")
        require(len(kept) > 0, "expected at least one tensor to keep")
        self.per, self._moves, self._spec = per, 0, kept
        self._kept = self._allocate(kv.k)

    def __getitem__(self, name: str) -> Tensor:
        """[P, G, units, width], at its current address."""
        return self._kept[name]

    @property
    def units(self) -> int:
        """Units that a page has room for."""
        return next(iter(self._kept.values())).shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.numel() * x.element_size() for x in self._kept.values())

    @property
    def generation(self) -> int:
        return self._moves

    def ensure_capacity(self, kv: KVView) -> None:
        """Grow to the layer's memory, if that has another size. Pages keep their numbers, units their places.

        Call it before a pass's units are written, and not during a capture.
        """
        held = next(iter(self._kept.values()))
        if held.shape[0] == kv.k.shape[0] and held.shape[2] == -(-kv.page // self.per):
            return
        old, self._kept = self._kept, self._allocate(kv.k)
        self._moves += 1
        with torch.inference_mode(False), torch.no_grad():
            for name, x in self._kept.items():
                pages, units = min(x.shape[0], old[name].shape[0]), min(x.shape[2], old[name].shape[2])
                x[:pages, :, :units] = old[name][:pages, :, :units]

    def zero(self) -> None:
        """Fill all of it with zeros."""
        for x in self._kept.values():
            x.zero_()

    def locate(self, kv: KVView, seq: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
        """Page, and unit in that page, of `unit` of sequence `seq` (both int, broadcast together)."""
        number = unit * self.per // kv.page
        page = seq if kv.block_table is None else kv.block_table[seq, number]
        first = (number * kv.page + self.per - 1) // self.per  # the first unit that begins in the page
        return page.long().expand_as(unit), (unit - first).long()

    @abstractmethod
    def note(self, kv: KVView, seq: Tensor, slot: Tensor) -> None:
        """Compute the units that hold these slots (int [n], of sequences seq [n]) from kv.k, slots in use alone."""

    def written(self, layer: int, view: KVView, seq: Tensor, slot: Tensor) -> None:
        """Compute the units of these slots again from the keys that are there now."""
        self.ensure_capacity(view)
        self.note(view, seq, slot)

    def kept(self, layer: int, view: KVView) -> None:
        """Compute all units again from the kept keys."""
        self.ensure_capacity(view)
        units = (view.seq_lens.long() + self.per - 1) // self.per
        seq = torch.repeat_interleave(torch.arange(view.sequences, device=units.device), units)
        first = torch.cumsum(units, 0) - units
        unit = torch.arange(seq.shape[0], device=units.device) - first[seq]
        piece = max(1, AT_ONCE // (view.heads * view.k.shape[3]))
        for some, those in zip(seq.split(piece), unit.split(piece), strict=True):
            self.note(view, some, those * self.per)

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> PerTokenState:
        """Pages that came after the last `ensure_capacity` hold nothing yet: any page stands in for them."""
        (source,), new = pages, copy.copy(self)
        with torch.inference_mode(False), torch.no_grad():
            new._kept = {name: x[source.clamp(max=x.shape[0] - 1)] for name, x in self._kept.items()}
        return new

    def to_save(self) -> dict[str, Tensor]:
        """Nothing: `kept` computes all units again."""
        return {}

    def _allocate(self, k: Tensor) -> dict[str, Tensor]:
        units = -(-k.shape[2] // self.per)
        with torch.inference_mode(False):  # it outlives the mode this pass runs in
            return {
                name: k.new_empty((k.shape[0], k.shape[1], units, *(() if width is None else (width,))), dtype=dtype)
                for name, (width, dtype) in self._spec.items()
            }
