"""Random numbers that follow from what they are drawn for: the same in every batch, chunk, rank and replay."""

from __future__ import annotations

import torch
from torch import Tensor

# the multipliers and shifts of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as signed numbers
GOLDEN, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


def uniforms(seed: int, layer: int | Tensor, pos: Tensor, heads: Tensor) -> Tensor:
    """fp64 [R, heads] in [0, 1), multiples of 2^-32: one number for each position and head of a layer.

    layer: its number, or int [layers] for those of several layers at once: fp64 [layers, R, heads]. pos: int [R].
    heads: int [heads], numbers of the heads in the whole model, so that ranks draw what one process does.
    Integer arithmetic on the device, without a generator: it may be captured, and replays draw by their positions.
    """
    state = _mixed(torch.full((), seed, dtype=torch.int64, device=pos.device) * GOLDEN + layer)[..., None]
    state = _mixed(state + pos.long() * GOLDEN)[..., None]
    state = _mixed(state + (heads.long() + 1) * GOLDEN)
    return ((state >> 32) & 0xFFFFFFFF).double() * 2.0**-32


def _mixed(x: Tensor) -> Tensor:
    """int64: SplitMix64's output function, modulo 2^64."""
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifted right without its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
