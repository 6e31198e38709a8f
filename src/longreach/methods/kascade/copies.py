"""The 8-bit copy of an anchor's keys, which are then scored at half the bytes of bf16 keys."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.methods.base import LayerCall
from longreach.ops import KVView, ScoringKeys, copy_keys


class KeyCopy:
    """int8 keys and their scales, laid out as the cache's memory of the layer is: its block tables find them.

    Written where rows' keys are, as they come; slots past those a sequence holds may be anything. (D + 4) / 2 D of
    the bytes of bf16 keys.
    moved: how often the memory was replaced, because the cache's was; what was captured before reads the old one.
    """

    def __init__(self, kv: KVView):
        self.moved = 0
        self.k, self.scale = _memory(kv.k)

    @property
    def keys(self) -> ScoringKeys:
        """What score_keys reads in place of the layer's keys."""
        return ScoringKeys(self.k, self.scale)

    def note(self, call: LayerCall) -> None:
        """Copy the keys of the call's rows. No device sync."""
        with torch.inference_mode(False), torch.no_grad():  # it outlives the mode this pass runs in
            self._fit(call.kv.k)
            copy_keys(call.rows, call.kv, self.keys)

    def bytes_read(self, call: LayerCall) -> Tensor:
        """Of the copy, by scoring each of the call's rows: int64 [R]."""
        one = self.k.shape[3] * self.k.element_size() + self.scale.element_size()
        return (call.rows.pos.long() + 1) * (self.k.shape[1] * one)

    def _fit(self, k: Tensor) -> None:
        """Follow the cache to a larger memory, as it moves: pages keep their numbers, slots their places."""
        if self.k.shape == k.shape:
            return
        self.moved += 1
        old = self.k, self.scale
        self.k, self.scale = _memory(k)
        pages, size = min(old[0].shape[0], k.shape[0]), min(old[0].shape[2], k.shape[2])
        for new, held in zip((self.k, self.scale), old, strict=True):
            new[:pages, :, :size] = held[:pages, :, :size]


def _memory(k: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return k.new_empty(k.shape, dtype=torch.int8), k.new_empty(k.shape[:3], dtype=torch.float32)
