"""The entry point of scan."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.carry import ScanCarry
from longreach.ops.checks import limits
from longreach.ops.impl import Implementations
from longreach.ops.types import FLOATS, INTS, accumulator, describe, require

IMPLEMENTATIONS = Implementations(
    "scan", {"reference": "longreach.ops.scan.reference:scan", "triton": "longreach.ops.scan.triton:scan"}
)


def scan(
    x: Tensor, decay: Tensor | None, seq: Tensor, pos: Tensor, carry: ScanCarry, *, impl: str = "auto"
) -> tuple[Tensor, ScanCarry]:
    """The running mean of each sequence, token by token: an exponential moving average, or the mean of all tokens.

        W_t = 1 + decay W_(t-1)
        y_t = (x_t + decay W_(t-1) y_(t-1)) / W_t

    so the weights of y_t, decay^age / W_t, sum to 1 at every token (the level-2 memory of MKA, normalised: at the
    first token y is x). W and y continue from `carry`, or from nothing at a token of position 0.

    x: float [R, G, D], packed rows: the rows of a sequence are consecutive and in order.
    decay: float [G] in (0, 1), one for each KV head; None: 1, the mean of all tokens so far (no forgetting).
    seq: int [R], the sequence of each row, in [0, B); negative for padding, which gives 0 and enters no state.
    pos: int [R], positions. Position 0 starts a new sequence, also within the rows of one `seq` (packed documents).
    carry: the state before these rows, mean [B, G, D] and weight [B, G]; `ScanCarry.empty` at the start. Rows of one
        call, of several calls in order, and of single tokens give the same up to rounding.

    Returns y [R, G, D] with the dtype of x, and the state after the rows; sequences without rows keep theirs. Sums are
    fp32 (fp64 for fp64). NaN of a sequence stay in it. Nothing waits for a GPU.
    Differentiable in x, decay, carry.mean and carry.weight, through y and the returned state. Triton's gradients are
    the same bits at each call; its backward is itself not differentiable.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, and on a CPU for values: a decay outside (0, 1),
    sequences past B or in several runs of rows; UnknownName for an unknown impl; Unsupported for fp64 in Triton.
    """
    require(isinstance(x, Tensor) and x.dim() == 3, lambda: f"x: expected [R, G, D], got {describe(x)}")
    require(x.dtype in FLOATS, lambda: f"x: expected bf16, fp16, fp32 or fp64, got {describe(x)}")
    rows, heads, dim = x.shape
    require(heads >= 1 and dim >= 1, lambda: f"x: expected at least one head and channel, got {describe(x)}")
    for name, ints in (("seq", seq), ("pos", pos)):
        ok = isinstance(ints, Tensor) and ints.dtype in INTS and ints.shape == (rows,) and ints.device == x.device
        require(ok, lambda: f"{name}: expected int32 or int64 [R={rows}] on {x.device}, got {describe(ints)}")
    require(isinstance(carry, ScanCarry), lambda: f"carry: expected a ScanCarry, got {describe(carry)}")
    ok = carry.mean.shape[1:] == (heads, dim) and carry.mean.dtype == accumulator(x.dtype)
    ok = ok and carry.mean.device == x.device
    wants = f"{accumulator(x.dtype)} [B, {heads}, {dim}] on {x.device}"
    require(ok, lambda: f"carry: expected a mean {wants}, got {describe(carry.mean)}")
    if decay is not None:
        ok = isinstance(decay, Tensor) and decay.is_floating_point() and decay.shape == (heads,)
        ok = ok and decay.device == x.device
        require(ok, lambda: f"decay: expected float [G={heads}] on {x.device} or None, got {describe(decay)}")
    if x.device.type == "cpu":
        _check_values(decay, seq, carry.mean.shape[0])
    found: tuple[Tensor, ScanCarry] = IMPLEMENTATIONS.get(impl, x.device)(x, decay, seq, pos, carry)
    return found


def _check_values(decay: Tensor | None, seq: Tensor, sequences: int) -> None:
    if decay is not None:
        inside = bool(((decay > 0) & (decay < 1)).all())
        require(inside, lambda: f"decay: expected values in (0, 1), got {decay.tolist()}; None is a mean of all tokens")
    if not seq.numel():
        return
    high = limits(seq)[1]
    require(high < sequences, lambda: f"seq: expected below the {sequences} sequences of carry, got {high}")
    starts = torch.cat([seq[:1], seq[1:][seq[1:] != seq[:-1]]])
    starts = starts[starts >= 0]
    once = len(starts.unique()) == len(starts)
    require(once, "seq: expected the rows of each sequence to be consecutive; sort them, and leave padding at the ends")
