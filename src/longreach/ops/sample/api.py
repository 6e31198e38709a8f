"""The front door of sample."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from longreach.ops.doors import Op
from longreach.ops.impl import Implementations
from longreach.ops.types import INTS, describe, require


def _named(op: str, *names: str) -> Implementations:
    return Implementations(op, {name: f"longreach.ops.sample.{name}:{op}" for name in names}, fp64=True)


IMPLEMENTATIONS = _named("sample", "reference", "triton", "numba")
DRAWING = _named("draw", "reference", "numba")
HIGHEST = 4  # power of a score


class Sampled(NamedTuple):
    """What `Lists` takes: columns int32 and log_weight fp32 [L, heads, C], ascending columns; used int32 [L, heads].

    factor: fp32 [L, heads, C], of each column's squared deviation in the variance of a sum (`sampling_variance`).
    """

    columns: Tensor
    used: Tensor
    log_weight: Tensor
    factor: Tensor


def sample(
    x: Tensor, count: Tensor, length: Tensor, offset: Tensor, *, capacity: int, uniform: float = 0.05,
    power: float = 1.0, first: int = 0, last: int = 0, impl: str = "auto",
) -> Sampled:  # fmt: skip
    """Columns of each row drawn without replacement by systematic sampling, with probabilities from scores.

    A column of [0, length) is included with probability pi = min(1, c p), p = (1 - uniform) x^power / sum x^power +
    uniform / n over the n columns that may be drawn, and c such that the probabilities sum to count: columns at 1 are
    certain. log_weight = -log pi, so that a sum over the sample weighted by exp(log_weight) is unbiased (Horvitz and
    Thompson, 1952). Ascending columns are drawn by one offset a row: i where floor(pi_0 + .. + pi_i + offset) grows
    (Madow, 1949). So the sample has exactly `count` columns, and two near each other are seldom drawn together.
    factor = 1 - pi: the variance as if columns were drawn independently, as is usual for systematic samples (Hartley
    and Rao, 1962); 0 for certain ones.

    x: [L, heads, N] fp32, scores >= 0; negative ones, infinity and NaN count as 0. count: int [L, heads], below 0 as
    0, above the length as the length. length: int [L]. offset: float [L, heads] in [0, 1), see `uniforms`. first, last:
    columns at both ends of the length that are certain, as part of the count; where it is smaller, the last ones come
    first.
    capacity: entries of a list; a count above it is the overflow of `Lists`: the row then reads everything.
    uniform: in (0, 1], the share of the count that is spread evenly, so that no weight exceeds n / (uniform count).
    power: in (0, 4], so that no fp32 score overflows fp64; below 1 for scores that are less sure, such as those of
        another layer.

    Entries past a list's end may be anything. Nothing waits for the device; in a CUDA graph counts, lengths and offsets
    may change between replays. Implementations round differently: where a sum is next to a whole number, they may draw
    neighbouring columns. Raises InvalidInput for shapes, dtypes, devices and numbers that do not fit, UnknownName, and
    Unsupported for more than 2^24 columns with Triton.
    """
    _check_scores(x, count, length)
    _check_numbers("offset", offset, x, ())
    for name, number, least in (("first", first, 0), ("last", last, 0), ("capacity", capacity, 1)):
        ok = isinstance(number, int) and not isinstance(number, bool) and number >= least
        require(ok, lambda: f"{name}: expected an int >= {least}, got {number!r}")
    for name, value, most in (("uniform", uniform, 1), ("power", power, HIGHEST)):
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= most
        require(ok, lambda: f"{name}: expected a number in (0, {most}], got {value!r}")
    compute = IMPLEMENTATIONS.get(impl, x.device, x)
    return compute(x, count, length, offset, capacity=capacity, uniform=uniform, power=power, first=first, last=last)


def draw(x: Tensor, count: Tensor, length: Tensor, numbers: Tensor, *, impl: str = "auto") -> Sampled:
    """Columns of each row drawn independently, with replacement, with probabilities p proportional to scores.

    The oracle sampling of MagicPIG (Chen et al., 2024, arXiv 2410.16179, Def. 3.1). A column that `times` of the count
    draws hit is listed once, with log_weight = log(times / (count p)): a sum over the list weighted by exp(log_weight)
    is unbiased. Columns of score 0 are never drawn; a row of zeros draws all columns alike. factor = 1 / times.

    x, count, length: as in `sample`, but count may exceed the length. numbers: float [L, heads, C] in [0, 1), one for
    each draw; those past the count are not used, and a count above C is C. The result's `used` is the number of
    distinct columns, its capacity C.

    Nothing waits for the device. Raises InvalidInput for shapes, dtypes and devices that do not fit, UnknownName.
    """
    _check_scores(x, count, length)
    draws = numbers.shape[2:] if isinstance(numbers, Tensor) and numbers.dim() == 3 else ("C",)
    _check_numbers("numbers", numbers, x, tuple(draws))
    compute = DRAWING.get(impl, x.device, x)
    return compute(x, count, length, numbers)


def _check_scores(x: Tensor, count: Tensor, length: Tensor) -> None:
    ok = isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()
    require(ok, lambda: f"x: expected float [L, heads, N], got {describe(x)}")
    lists, heads, columns = x.shape
    ok = isinstance(count, Tensor) and count.dtype in INTS and count.shape == (lists, heads)
    require(ok, lambda: f"count: expected int32 or int64 [L={lists}, heads={heads}], got {describe(count)}")
    ok = isinstance(length, Tensor) and length.dtype in INTS and length.shape == (lists,)
    require(ok, lambda: f"length: expected int32 or int64 [L={lists}], got {describe(length)}")
    for name, tensor in (("count", count), ("length", length)):
        require(tensor.device == x.device, lambda: f"{name}: expected on {x.device} like x, got {describe(tensor)}")
    if length.device.type == "cpu" and length.numel():  # elsewhere reading values would cost a sync
        low, high = int(length.min()), int(length.max())
        require(low >= 0 and high <= columns, lambda: f"length: expected in [0, N={columns}], got {low} to {high}")


def _check_numbers(name: str, numbers: Tensor, x: Tensor, more: tuple[int | str, ...]) -> None:
    lists, heads, _ = x.shape
    ok = isinstance(numbers, Tensor) and numbers.is_floating_point() and numbers.shape == (lists, heads, *more)
    shape = ", ".join([f"L={lists}", f"heads={heads}", *map(str, more)])
    require(ok, lambda: f"{name}: expected float [{shape}], got {describe(numbers)}")
    require(numbers.device == x.device, lambda: f"{name}: expected on {x.device} like x, got {describe(numbers)}")
    if numbers.device.type == "cpu" and numbers.numel():
        low, high = float(numbers.min()), float(numbers.max())
        require(low >= 0 and high < 1, lambda: f"{name}: expected in [0, 1), got {low} to {high}")


SAMPLE = Op(sample, IMPLEMENTATIONS, ())
DRAW = Op(draw, DRAWING, ())
