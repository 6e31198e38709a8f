"""MKA's memory in a DynamicCache of plain transformers: kept and reordered with the keys of each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from longreach.adapters.transformers.cache_name import CACHE
from longreach.errors import InvalidInput, Unsupported
from longreach.mka.config import MKAConfig
from longreach.mka.fast import FastMemory
from longreach.mka.tokens import Tokens
from longreach.ops.scan import ScanCarry


@dataclass(frozen=True)
class Held:
    """The memory of a layer after `columns` columns of a cache.

    count: int64 [B], real tokens of each row. memory: None where documents were packed, which nothing can continue.
    first_position: int64 [B], the position by which each row's first token is rotated; None if it is 0 in all.
    real: bool [B, columns], which columns are tokens; None if all are, or if the memory cannot be cut.
    """

    config: MKAConfig
    columns: int
    count: Tensor
    memory: FastMemory | None
    first_position: Tensor | None = None
    real: Tensor | None = None

    @property
    def can_cut(self) -> bool:
        """Whether tokens at the end can be removed: from sums and running means they cannot."""
        return self.memory is not None and self.memory.carry is None and self.memory.sums is None

    def cut(self, columns: int) -> Held:
        """The memory of the first `columns` columns, of one that `can_cut`."""
        if self.real is None:
            return replace(self, columns=columns, count=self.count - (self.columns - columns))
        real = self.real[:, :columns]
        return replace(self, columns=columns, count=real.sum(1), real=real)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Held:
        """With every tensor [B, ...] changed."""
        memory = self.memory
        if memory is not None:
            carry, sums = memory.carry, memory.sums
            carry = None if carry is None else ScanCarry(change(carry.mean), change(carry.weight))
            memory = FastMemory(carry, None if sums is None else change(sums))
        first, real = (None if x is None else change(x) for x in (self.first_position, self.real))
        return replace(self, count=change(self.count), memory=memory, first_position=first, real=real)


class MemoryLayer(DynamicLayer):
    """A layer of a DynamicCache with MKA's memory."""

    held: Held | None = None

    def reset(self) -> None:
        self.is_initialized = False  # transformers before 5.23 fills keys with zeros, and they still count
        self.keys = self.values = None
        super().reset()
        self.held = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove columns at the end. Raises Unsupported for running means and sums of blocks, unless all columns go."""
        columns, held = self.get_seq_length(), self.held
        if held is not None and not held.can_cut and 0 < -tokens_to_remove < columns:
            raise Unsupported(
                f"crop: the memory that {held.config.variant} keeps of {columns} columns cannot be cut to "
                f"{columns + tokens_to_remove} (assisted generation?); copy the cache (copy.deepcopy) before the "
                f"tokens that are to be removed"
            )
        super().crop(tokens_to_remove)
        removed = columns - self.get_seq_length()
        if held is not None and removed:
            self.held = held.cut(held.columns - removed) if held.can_cut and removed < columns else None

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._change(lambda x: x[indices.to(x.device)])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.held = None if self.held is None else self.held.changed(change)


def layer_of(cache: Any, layer: int) -> MemoryLayer:
    """The layer of a cache, made ready for a memory. Raises Unsupported for caches that do not keep all keys."""
    if not isinstance(cache, Cache):
        raise Unsupported(f"{CACHE}: MKA takes a DynamicCache, got {type(cache).__name__}")
    if cache.layer_class_to_replicate is not None:  # as transformers does at a layer's first keys
        while len(cache.layers) <= layer:
            cache.layers.append(cache.layer_class_to_replicate())
    found = cache.layers[layer]
    if type(found) is DynamicLayer:
        found.__class__ = MemoryLayer
    if not isinstance(found, MemoryLayer):
        raise Unsupported(
            f"{CACHE}: MKA takes a DynamicCache, whose layers keep all keys, and layer {layer} of this "
            f"{type(cache).__name__} is a {type(found).__name__}; leave cache_implementation out"
        )
    return found


def held_in(cache: Any, layer: int) -> Held:
    """What this layer holds of the cache's tokens. Raises InvalidInput for a cache that another model has filled, or
    this one not in all layers."""
    held = _checked(layer_of(cache, layer), layer)
    columns = {n: x.get_seq_length() for n, x in enumerate(cache.layers) if isinstance(x, MemoryLayer)}
    if len(set(columns.values())) > 1:
        raise InvalidInput(
            f"{CACHE}: layers hold {sorted(set(columns.values()))} columns, not all the same (a pass failed?); "
            f"start with an empty cache"
        )
    return held


def memory_before(layer: MemoryLayer, number: int, config: MKAConfig, tokens: Tokens, fresh: FastMemory) -> FastMemory:
    """The memory before a pass, with room for its tokens; `fresh` at the beginning.

    Raises InvalidInput where the layer's keys are not those that the memory has seen, or nothing can follow them.
    """
    if tokens.fresh and not layer.get_seq_length():
        return fresh
    held = _checked(layer, number)
    memory = held.memory
    if held.config != config or memory is None or tokens.fresh:
        why = "documents were packed into it" if memory is None else "a model with other options of MKA filled it"
        raise InvalidInput(f"{CACHE}: layer {number} cannot be continued, as {why}; start with an empty cache")
    if memory.sums is None or fresh.sums is None:
        return memory
    room = max(0, fresh.sums.shape[1] - memory.sums.shape[1])
    return replace(memory, sums=F.pad(memory.sums, (0, 0, 0, 0, 0, room)))


def _checked(layer: MemoryLayer, number: int) -> Held:
    """What a layer with keys holds. Raises InvalidInput where that is not of these keys."""
    columns = layer.get_seq_length()
    if layer.held is None or layer.held.columns != columns:
        seen = 0 if layer.held is None else layer.held.columns
        raise InvalidInput(
            f"{CACHE}: layer {number} holds {columns} columns, of which this model has seen {seen} (a cache of "
            f"another model, or of a pass that failed?); start with an empty cache"
        )
    return layer.held
