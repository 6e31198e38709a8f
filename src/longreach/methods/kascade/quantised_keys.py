"""An 8-bit copy of an anchor's keys, scored at half the bytes of bf16 keys."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.cache import PerTokenState
from longreach.ops import KVView, ScoringKeys, copy_keys


class QuantisedKeys(PerTokenState):
    """["keys"] int8 [P, G, page, D] and ["scale"] fp32 [P, G, page]: (D + 4) / 2 D of the bytes of bf16 keys."""

    def __init__(self, kv: KVView):
        super().__init__(kv, keys=(kv.k.shape[3], torch.int8), scale=(None, torch.float32))

    @property
    def scoring(self) -> ScoringKeys:
        """The keys that score_keys reads in place of the layer's."""
        return ScoringKeys(self["keys"], self["scale"])

    def note(self, kv: KVView, seq: Tensor, slot: Tensor) -> None:
        """Quantise the keys in these slots, int [n] each. No device sync."""
        with torch.inference_mode(False), torch.no_grad():  # it outlives the mode this pass runs in
            copy_keys(seq, slot, kv, self.scoring)
