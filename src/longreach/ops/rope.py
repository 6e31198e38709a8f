"""Rotary position embedding: apply it, take it off, move a key to another position (Su et al., 2021).

Pair i of the first `rotary` channels turns by angle pos * inv_freq[i]; channels after them stay. "half"
pairs channel i with i + rotary/2 (Llama), "interleaved" pairs 2i with 2i + 1 (GLM, GPT-J).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from longreach.ops.types import describe, require

Layout = Literal["half", "interleaved"]
LAYOUTS = get_args(Layout)


class RotaryAngles(NamedTuple):
    """How each row was rotated. cos, sin: float [R, rotary/2], any strides; cos^2 + sin^2 may differ from 1 (YaRN)."""

    cos: Tensor
    sin: Tensor
    layout: Layout = "half"

    def undo(self, x: Tensor) -> Tensor:
        """x [R, heads, D] as it was before."""
        return unrotate(x, self.cos[:, None], self.sin[:, None], layout=self.layout)

    def take(self, index: Tensor) -> RotaryAngles:
        """The angles of the rows at `index` [r]."""
        return RotaryAngles(self.cos[index], self.sin[index], self.layout)


class RotaryFrequencies(NamedTuple):
    """How a model rotates at any position. inv_freq: float [rotary/2], radians per position; layout: of the pairs.

    The attention factor of YaRN is no part of it: rotated vectors keep their length.
    """

    inv_freq: Tensor
    layout: Layout = "half"

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """x [..., D] rotated further by `by` positions: int or float, broadcast against x's leading dimensions.

        A key rotated at position p becomes that of p + by; by = -p takes the rotation off. fp32 (fp64 for fp64), of
        angles in fp64. Differentiable in x.
        """
        require(isinstance(x, Tensor), lambda: f"x: expected a float tensor, got {describe(x)}")
        _check_frequencies(self.inv_freq, by, "by")
        turn = by[..., None].to(torch.float64) * self.inv_freq.to(torch.float64)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return rotate(x.to(wide), turn.cos().to(wide), turn.sin().to(wide), layout=self.layout)


def angles(pos: Tensor, inv_freq: Tensor, *, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos, sin of pos * inv_freq times `scaling` (YaRN's attention factor): fp32 [..., rotary/2].

    pos: int or float [...]; inv_freq: float [rotary/2], radians per position.
    """
    _check_frequencies(inv_freq, pos, "pos")
    turn = pos[..., None].to(torch.float64) * inv_freq.to(torch.float64)  # fp32 loses digits at 1M positions
    return (turn.cos() * scaling).float(), (turn.sin() * scaling).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, layout: Layout = "half") -> Tensor:
    """x turned: (a, b) -> (a cos - b sin, b cos + a sin) per pair.

    x: [..., D]; cos, sin: [..., rotary/2], broadcast against x's leading dimensions, rotary <= D.
    Returns x's dtype, computed in fp32 (fp64 for fp64). Raises InvalidInput for shapes that do not fit.
    """
    pairs = _pairs(x, cos, sin, layout)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    turned, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
    a, b = (turned[..., :pairs], turned[..., pairs:]) if layout == "half" else (turned[..., ::2], turned[..., 1::2])
    c, s = cos.to(wide), sin.to(wide)
    out = (a * c - b * s, b * c + a * s)
    joined = torch.cat(out, -1) if layout == "half" else torch.stack(out, -1).flatten(-2)
    return torch.cat([joined.to(x.dtype), rest], -1)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor, *, layout: Layout = "half") -> Tensor:
    """The inverse of rotate, scaling included: R(-angle) / (cos^2 + sin^2)."""
    _pairs(x, cos, sin, layout)
    size = cos.double() ** 2 + sin.double() ** 2
    return rotate(x, cos / size, -sin / size, layout=layout)  # unrounded: cos and sin may be bf16


def reposition(x: Tensor, old: Tensor, new: Tensor, inv_freq: Tensor, *, layout: Layout = "half") -> Tensor:
    """Keys rotated for positions `old` turned to `new`: R(new) k = R(new - old) R(old) k; scaling is kept.

    x: [..., D]; old, new: int, broadcast against x's leading dimensions; inv_freq: [rotary/2].
    """
    both = isinstance(old, Tensor) and isinstance(new, Tensor)
    require(both, f"old, new: expected tensors of positions, got {describe(old)} and {describe(new)}")
    require(old.device == new.device, f"old, new: expected on one device, got {describe(old)} and {describe(new)}")
    cos, sin = angles(new - old, inv_freq)
    return rotate(x, cos, sin, layout=layout)


def _check_frequencies(inv_freq: Tensor, pos: Tensor, name: str) -> None:
    ok = isinstance(inv_freq, Tensor) and inv_freq.dim() == 1 and inv_freq.is_floating_point()
    require(ok, f"inv_freq: expected float [rotary/2], got {describe(inv_freq)}")
    require(isinstance(pos, Tensor), f"{name}: expected a tensor of positions, got {describe(pos)}")
    require(pos.device == inv_freq.device, f"{name}: expected on {inv_freq.device} like inv_freq, got {describe(pos)}")


def _pairs(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> int:
    """How many pairs turn; raises InvalidInput where the arguments do not fit together."""
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        ok = isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 1
        require(ok, f"{name}: expected a float tensor, got {describe(t)}")
    pairs = cos.shape[-1]
    require(cos.shape == sin.shape, f"cos, sin: expected equal shapes, got {describe(cos)} and {describe(sin)}")
    on = cos.device == sin.device == x.device
    require(on, f"cos, sin: expected on {x.device} like x, got {describe(cos)} and {describe(sin)}")
    fits = 2 * pairs <= x.shape[-1]
    require(fits, f"cos: {pairs} pairs need a head dim of at least {2 * pairs}, got {describe(x)}")
    fits = _broadcasts(cos.shape[:-1], x.shape[:-1])
    require(fits, f"cos: {describe(cos)} does not broadcast against the leading dimensions of x, {describe(x)}")
    require(layout in LAYOUTS, f"layout: expected 'half' or 'interleaved', got {layout!r}")
    return pairs


def _broadcasts(small: torch.Size, large: torch.Size) -> bool:
    """Whether `small` broadcasts to exactly `large`."""
    tail = large[len(large) - len(small) :]
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(small, tail, strict=True))
