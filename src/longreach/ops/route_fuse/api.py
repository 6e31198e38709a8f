"""The entry point of route_fuse."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from longreach.ops.carry import CarryMemory
from longreach.ops.checks import limits
from longreach.ops.impl import Implementations
from longreach.ops.types import FLOATS, INTS, accumulator, describe, require

IMPLEMENTATIONS = Implementations(
    "route_fuse",
    {
        "reference": "longreach.ops.route_fuse.reference:route_fuse",
        "triton": "longreach.ops.route_fuse.triton:route_fuse",
    },
)
FIRST_LAYER = Implementations(
    "first_layer",
    {
        "reference": "torch.nn.functional:linear",
        "triton": "longreach.ops.route_fuse.triton:first_layer",
    },
)


@dataclass(frozen=True)
class RouterLayer:
    """The second layer of a router over two levels, its input, and the gates after it.

        lambda = softmax(weight silu(hidden) + bias)
        weights of the levels = start + gate (lambda - start), start = (1, 0)

    gate: [2]. hidden: [R, W], weight: [2, W], bias: [2], of one dtype; silu and logits are rounded to it. hidden None:
    lambda = (1/2, 1/2). hard: lambda is 1 for the larger one, for the first of equal ones, else 0.
    """

    gate: Tensor
    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    hard: bool = False

    def __post_init__(self) -> None:
        gate, hidden = self.gate, self.hidden
        ok = isinstance(gate, Tensor) and gate.shape == (2,) and gate.dtype in FLOATS
        require(ok, lambda: f"gate: expected float [2], got {describe(gate)}")
        if hidden is None:
            require(not self.hard, "hard: expected a hidden layer to choose by")
            return
        ok = isinstance(hidden, Tensor) and hidden.dim() == 2 and hidden.shape[1] >= 1 and hidden.dtype in FLOATS
        require(ok, lambda: f"hidden: expected float [R, W], got {describe(hidden)}")
        for name, x, shape in (("weight", self.weight, (2, hidden.shape[1])), ("bias", self.bias, (2,))):
            fits = isinstance(x, Tensor) and x.shape == shape and x.dtype == hidden.dtype and x.device == gate.device
            require(fits, lambda: f"{name}: expected {hidden.dtype} {list(shape)} on {gate.device}, got {describe(x)}")

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.gate, self.hidden, self.weight, self.bias) if x is not None]


def first_layer(x: Tensor, weight: Tensor, bias: Tensor | None, *, impl: str = "auto") -> Tensor:
    """The router's hidden layer [R, W] before its SiLU: x weight^T + bias, summed in fp32 and rounded once.

    x: float [R, K]; weight: [W, K], the last dimension contiguous, and bias [W] (None: 0), of its dtype. A kernel that
    runs just before may write x, but not the weights. For few rows: each one reads all weights.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, UnknownName for an unknown impl, Unsupported for
    fp64 and for gradients in Triton.
    """
    ok = isinstance(x, Tensor) and x.dim() == 2 and x.dtype in FLOATS
    require(ok, lambda: f"x: expected float [R, K], got {describe(x)}")
    ok = isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == x.shape[1] and weight.dtype == x.dtype
    ok = ok and weight.device == x.device and weight.stride(1) == 1 and min(weight.shape) >= 1
    require(ok, lambda: f"weight: expected {x.dtype} [W, {x.shape[1]}] on {x.device}, got {describe(weight)}")
    ok = bias is None or (isinstance(bias, Tensor) and bias.shape == weight.shape[:1] and bias.dtype == x.dtype)
    ok = ok and (bias is None or bias.device == x.device)
    require(ok, lambda: f"bias: expected {x.dtype} [{weight.shape[0]}] on {x.device} or None, got {describe(bias)}")
    found: Tensor = FIRST_LAYER.get(impl, x.device)(x, weight, bias)
    return found


def route_fuse(
    k: Tensor,
    v: Tensor,
    router: RouterLayer,
    decay: Tensor | None,
    seq: Tensor,
    pos: Tensor,
    memory: CarryMemory,
    *,
    limit: float,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of one token of each sequence, mixed with their running means (MKA, Algorithm 2).

    For each row, with x the key and value of a KV head side by side and y, W the carry of its sequence (see `scan`):

        W <- 1 + rate W        rate = sigmoid(decay)
        y <- (x + rate W y) / (1 + rate W)        with W before the token
        mixed = w_1 x + w_2 y        w: the router's weights of the levels, y rounded to the dtype of x

    At position 0 W is 0 before the token, so y is x. At gates of 0 the result is k and v, bit for bit.

    k, v: float [R, G, D], before key norms and rotation. A sequence has at most one row.
    router: the second layer and gates; hidden [R, W] of these rows.
    decay: float [G], logits of the decay, cut to [-limit, limit]; None: rate 1, the mean of all tokens so far. Decay,
        gates, and the second layer's weight and bias are parameters: no kernel right before may write them.
    seq: int [R], each row's sequence, in [0, B), in any order; negative for padding, which gives 0 and enters no state.
    pos: int [R], positions.
    memory: of the means, fp32 (fp64 for fp64) [S, E, G, 2 D]. Entries `before` of the sequences are read, entries
        `after` are written in place, also those of sequences without rows, which keep their carry. Both may be one.

    Returns mixed k, v [R, G, D] with their dtype and the weights of the levels, fp32 (fp64 for fp64) [R, 2]. Sums are
    fp32 (fp64 for fp64). One kernel on a GPU, and nothing waits for it. Only the reference is differentiable, and not
    through `memory`.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, and on a CPU for sequences, slots and entries
    out of range or named twice; UnknownName for an unknown impl; Unsupported for fp64 and for gradients in Triton.
    """
    require(isinstance(k, Tensor) and k.dim() == 3, lambda: f"k: expected [R, G, D], got {describe(k)}")
    ok = k.dtype in FLOATS and min(k.shape[1:]) >= 1
    require(ok, lambda: f"k: expected bf16, fp16, fp32 or fp64, heads and channels, got {describe(k)}")
    rows, heads, dim = k.shape
    ok = isinstance(v, Tensor) and v.shape == k.shape and v.dtype == k.dtype and v.device == k.device
    require(ok, lambda: f"v: expected {describe(k)} like k, got {describe(v)}")
    for name, ints in (("seq", seq), ("pos", pos)):
        ok = isinstance(ints, Tensor) and ints.dtype in INTS and ints.shape == (rows,) and ints.device == k.device
        require(ok, lambda: f"{name}: expected int32 or int64 [R={rows}] on {k.device}, got {describe(ints)}")
    require(isinstance(router, RouterLayer), lambda: f"router: expected a RouterLayer, got {describe(router)}")
    ok = router.gate.device == k.device
    require(ok, lambda: f"router: expected gates on {k.device}, got {describe(router.gate)}")
    hidden = router.hidden
    ok = hidden is None or (len(hidden) == rows and hidden.device == k.device)
    require(ok, lambda: f"router: expected a hidden layer [R={rows}, W] on {k.device}, got {describe(hidden)}")
    if decay is not None:
        ok = isinstance(decay, Tensor) and decay.dtype in FLOATS and decay.shape == (heads,)
        ok = ok and decay.device == k.device
        require(ok, lambda: f"decay: expected float [G={heads}] on {k.device} or None, got {describe(decay)}")
    ok = isinstance(limit, float) and 0 < limit < math.inf
    require(ok, lambda: f"limit: expected a finite number > 0, got {limit!r}")
    require(isinstance(memory, CarryMemory), lambda: f"memory: expected a CarryMemory, got {describe(memory)}")
    mean = memory.mean
    ok = mean.shape[2:] == (heads, 2 * dim) and mean.dtype == accumulator(k.dtype) and mean.device == k.device
    wants = f"{accumulator(k.dtype)} [S, E, {heads}, {2 * dim}] on {k.device}"
    require(ok, lambda: f"memory: expected means {wants}, got {describe(mean)}")
    if k.device.type == "cpu":
        _check_values(seq, memory)
    found: tuple[Tensor, Tensor, Tensor] = IMPLEMENTATIONS.get(impl, k.device)(
        k, v, router, decay, seq, pos, memory, limit
    )
    return found


def _check_values(seq: Tensor, memory: CarryMemory) -> None:
    sequences, (slots, entries) = len(memory.slots), memory.mean.shape[:2]
    given = (seq[seq >= 0], sequences), (memory.slots, slots), (memory.before, entries), (memory.after, entries)
    for name, (ints, count) in zip(("seq", "slots", "before", "after"), given, strict=True):
        low, high = limits(ints) if ints.numel() else (0, -1)
        require(low >= 0 and high < count, lambda: f"{name}: expected in [0, {count}), got {low} to {high}")
    for name, (ints, _) in zip(("seq", "slots"), given, strict=False):
        once = len(ints.unique()) == len(ints)
        require(once, lambda: f"{name}: expected each number once, got {ints.tolist()}")
