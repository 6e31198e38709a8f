"""Codes of blocks of keys, and of the queries that look for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from longreach.ops.directions import directions
from longreach.ops.rope import RotaryFrequencies, angles
from longreach.ops.types import FLOATS, INTS, accumulator, describe, require

Kind = Literal["summary", "bounds", "hash"]
KINDS = get_args(Kind)
Pool = Literal["softmax", "sum"]
WIDEST = 256  # channels of a code
AT_ONCE = 1 << 24  # numbers that `hash` holds in fp64 at a time


def planes_of(dim: int, bits: int, seed: int) -> Tensor:
    """Random planes for "hash": bf16 [dim, bits], on the CPU; one seed gives the same on every platform.

    bits: a multiple of 8 up to 256. seed: in [0, 2^32).
    """
    require(isinstance(dim, int) and dim >= 1, lambda: f"dim: expected an int >= 1, got {dim!r}")
    check_bits(bits)
    return directions(dim, bits, seed=seed)


def check_bits(bits: object, name: str = "bits") -> None:
    """Raise InvalidInput unless `bits` is a multiple of 8 up to 256. name: of the option, in the message."""
    ok = isinstance(bits, int) and not isinstance(bits, bool) and bits % 8 == 0 and 8 <= bits <= WIDEST
    require(ok, lambda: f"{name}: expected a multiple of 8 up to {WIDEST}, got {bits!r}")


def code_width(kind: Kind, dim: int, bits: int = 128) -> int:
    """F, the channels of codes of keys with `dim` channels; bits: those of hashes. Raises InvalidInput."""
    if kind == "hash":
        check_bits(bits)
        return bits
    width = dim * (2 if kind == "bounds" else 1)
    require(width <= WIDEST, lambda: f"head dim: codes {kind!r} take up to {WIDEST // 2}, got {dim}")
    return width


def signs(x: Tensor, planes: Tensor) -> Tensor:
    """Signs of planes^T x, 1 for 0: float [..., bits] of x [..., D] and planes [D, bits].

    In fp64, where few projections are so near 0 that their sign depends on how many are computed together.
    """
    return torch.where(x.double() @ planes.double() >= 0, 1.0, -1.0)


@dataclass(frozen=True, eq=False)
class BlockCode:
    """What stands for a block when rows choose blocks: a code of F channels, whose dot product with a row's is a score.

    Codes are computed from keys after rotation, as a cache holds them, so they can be computed again at any time.

    summary: F = D. The mean of the block's keys before rotation, rotated to the middle of the block, a half position
        for an even number of keys: mean over i of R((B - 1) / 2 - i) k_i. Rows: their queries.
    bounds: F = 2 D, D <= 128. The largest and the least value of each channel. Rows: [relu(q), -relu(-q)], so that the
        score is the upper bound of q . k over the block (Tang et al., 2024, arXiv 2406.10774).
    hash: F = bits. Signs (1 or -1; 1 for 0) of planes^T x, x the mean of the block's keys before rotation. Rows: the
        same signs of the query before rotation. A score counts equal signs less different ones.

    kind: one of these. frequencies: of the model's rotation, for summary and hash; for bounds they may be None.
    planes: float [D, bits] for hash (`planes_of`), else None. All on the device of the keys.
    """

    kind: Kind
    frequencies: RotaryFrequencies | None = None
    planes: Tensor | None = None
    _turns: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.kind in KINDS, lambda: f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.kind != "bounds":
            made = isinstance(self.frequencies, RotaryFrequencies)
            require(made, lambda: f"frequencies: expected RotaryFrequencies, got {describe(self.frequencies)}")
        if self.kind == "hash":
            x = self.planes
            ok = isinstance(x, Tensor) and x.dim() == 2 and x.dtype in FLOATS
            require(ok, lambda: f"planes: expected float [D, bits], got {describe(x)}")
            check_bits(self._planes.shape[1])

    @property
    def pool(self) -> Pool:
        """How `recall` pools the scores of the query heads of a KV head."""
        return "softmax" if self.kind == "summary" else "sum"

    def width(self, dim: int) -> int:
        """F, the channels of a code of keys with `dim` channels. Raises InvalidInput where it does not fit."""
        if self.planes is None or self.kind != "hash":
            return code_width(self.kind, dim)
        planes = self.planes
        require(planes.shape[0] == dim, lambda: f"planes: expected [D={dim}, bits], got {describe(planes)}")
        return planes.shape[1]

    def of_blocks(self, k: Tensor, first: Tensor) -> Tensor:
        """Codes of complete blocks: float [..., F], of the dtype of k.

        k: float [..., B, D], keys after rotation; first: int [...], the position of each block's first key.
        Computed in fp32 (fp64 for fp64; signs always in fp64). Differentiable in k, but for signs.
        """
        ok = isinstance(k, Tensor) and k.dim() >= 2 and k.dtype in FLOATS and k.shape[-2] >= 1
        require(ok, lambda: f"k: expected float [..., B, D], got {describe(k)}")
        ok = isinstance(first, Tensor) and first.dtype in INTS and first.shape == k.shape[:-2]
        require(ok, lambda: f"first: expected int {list(k.shape[:-2])}, got {describe(first)}")
        require(first.device == k.device, lambda: f"first: expected on {k.device} like k, got {describe(first)}")
        self.width(k.shape[-1])
        if self.kind == "bounds":
            return torch.cat([k.amax(-2), k.amin(-2)], -1)
        size, frequencies = k.shape[-2], self._frequencies
        middle = (size - 1) / 2
        offset = middle - torch.arange(size, device=k.device, dtype=torch.float64)
        mean = frequencies.turn(k, offset).mean(-2)
        if self.kind == "summary":
            return mean.to(k.dtype)
        return self._signs(mean, first.double() + middle).to(k.dtype)

    def turns(self, size: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) fp32 [size, rotary/2], by which the keys of a block of `size` are rotated to its middle; kept."""
        if size not in self._turns:
            inv_freq = self._frequencies.inv_freq
            offset = (size - 1) / 2 - torch.arange(size, device=inv_freq.device, dtype=torch.float64)
            with torch.inference_mode(False):  # they outlive the mode this pass runs in
                self._turns[size] = tuple(x.contiguous() for x in angles(offset, inv_freq))  # type: ignore[assignment]
        return self._turns[size]

    def of_rows(self, q: Tensor, pos: Tensor) -> Tensor:
        """Codes of queries: float [R, H, F], of the dtype of q. q: [R, H, D] after rotation; pos: int [R]."""
        ok = isinstance(q, Tensor) and q.dim() == 3 and q.dtype in FLOATS
        require(ok, lambda: f"q: expected float [R, H, D], got {describe(q)}")
        ok = isinstance(pos, Tensor) and pos.dtype in INTS and pos.shape == q.shape[:1] and pos.device == q.device
        require(ok, lambda: f"pos: expected int [R={q.shape[0]}] on {q.device}, got {describe(pos)}")
        width = self.width(q.shape[-1])
        if self.kind == "summary":
            return q
        if self.kind == "bounds":
            return torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)
        codes = q.new_empty(*q.shape[:2], width)
        piece = max(1, AT_ONCE // (q.shape[1] * max(width, q.shape[2])))
        for start in range(0, q.shape[0], piece):
            some = slice(start, start + piece)
            codes[some] = self._signs(q[some].to(accumulator(q.dtype)), pos[some].double()[:, None])
        return codes

    def _signs(self, x: Tensor, pos: Tensor) -> Tensor:
        """Signs of planes^T x, with the rotation of positions pos taken off."""
        return signs(self._frequencies.turn(x.detach().double(), -pos), self._planes).to(x.dtype)

    @property
    def _frequencies(self) -> RotaryFrequencies:
        assert self.frequencies is not None
        return self.frequencies

    @property
    def _planes(self) -> Tensor:
        assert self.planes is not None
        return self.planes
