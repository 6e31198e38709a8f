"""The session level: a running mean of keys and values before rotation (level 2 of MKA and FastMKA)."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.carry import CarryMemory
from longreach.ops.scan import ScanCarry, scan


def session(k: Tensor, v: Tensor, decay: Tensor | None, seq: Tensor, pos: Tensor, carry: ScanCarry | CarryMemory, *,
            impl: str = "auto") -> tuple[Tensor, Tensor, ScanCarry | CarryMemory]:  # fmt: skip
    """Level-2 keys and values: moving averages of the level-1 ones, whose weights sum to 1 at every token.

    k, v: [R, G, D] before key norm and rotation; decay: [G], or None for the mean of all tokens so far; seq, pos: [R].
    carry: over keys and values side by side, mean [B, G, 2 D]; memory of carries is written in place.
    Returns k2, v2 [R, G, D] and the carry after the rows, or that memory.
    By linearity of the projections these are the keys and values of the averaged hidden states (Algorithms 1 and 2).
    """
    before = carry.read() if isinstance(carry, CarryMemory) else carry
    found, after = scan(torch.cat([k, v], -1), decay, seq, pos, before, impl=impl)
    k2, v2 = found.split((k.shape[-1], v.shape[-1]), -1)
    if not isinstance(carry, CarryMemory):
        return k2, v2, after
    carry.write(after)
    return k2, v2, carry
