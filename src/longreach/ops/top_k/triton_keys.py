# mypy: ignore-errors
"""What top_k's kernels share: a row, keys in the order of scores, and the search for the key of a rank.

Keys are the order of floats as int32: NaN below everything, -0.0 as 0.0. Each round of a search counts what reaches two
keys, a standard deviation to either side of where the wanted one is expected if keys are spread evenly between those
known. How rows are given stands in `row_of`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-(1 << 31))  # the key of NaN
OVER = tl.constexpr(0x7F800001)  # past the key of +inf; as a value NaN, which no number reaches
UNDER = tl.constexpr(-0x7F800001)  # the key of -inf
COLUMNS, CAPACITY = tl.constexpr(8), tl.constexpr(11)  # where they are in `given`


@triton.jit
def key_of(x):
    """The key of fp32 values: int32, in their order."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(x != x, LEAST, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of(key):
    """The fp32 value of int32 keys; NaN for OVER and for what is below UNDER."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def row_of(row, given):
    """(scores, length, k, first, stop, busy): k columns are chosen, all before `first` and from `stop` on among them.

    Not busy: nothing is to be chosen, because k is 0 or exceeds the capacity.
    given: scores, their list and head stride, counts, lengths, their strides, heads, columns, how many first and last
    columns come before all others, capacity.
    """
    x, x_list, x_head, count, lengths, length_list, length_head, heads, columns, front, back, capacity = given
    of_list = (row // heads).to(tl.int64)
    of_head = (row % heads).to(tl.int64)
    length = tl.load(lengths + of_list * length_list + of_head * length_head)
    length = tl.minimum(tl.maximum(length, 0), columns).to(tl.int32)
    k = tl.minimum(tl.maximum(tl.load(count + row), 0), length).to(tl.int32)
    stop = length - tl.minimum(k, back)
    first = tl.where(k == length, stop, tl.minimum(k - (length - stop), front))
    return x + of_list * x_list + of_head * x_head, length, k, first, stop, (k > 0) & (k <= capacity)


@triton.jit
def aim(count, a, b, from_a, from_b, even, share):
    """A key in (a, b) that about `count` keys reach: from_a reach a, from_b reach b, those between lie evenly.

    Where they turned out not to be even: that part of the way down from b.
    """
    width = (b - a).to(tl.uint32, bitcast=True)
    down = tl.where(even, (count - from_b + 0.5) / (from_a - from_b + 1), share) * width.to(tl.float32)
    down = tl.minimum(tl.maximum(down, 1.0), 4e9).to(tl.uint32)  # what 32 bits hold
    return b - tl.minimum(down, width - 1).to(tl.int32, bitcast=True)


@triton.jit
def reaching(key, one, two):
    """How many of fewer than 32,768 keys reach `one` and `two`."""
    both = tl.sum((key >= one).to(tl.int32) + ((key >= two).to(tl.int32) << 16), 0)
    return both & 0xFFFF, both >> 16


@triton.jit
def around(rank, a, b, from_a, from_b, even):
    """Two keys in (a, b), one <= two, that the key of that rank likely lies between; thirds where _aim fails."""
    held, sought = (from_a - from_b).to(tl.float32), (rank - from_b).to(tl.float32)
    spread = tl.sqrt(sought * (held - sought) / held)  # a standard deviation of how many reach a key
    one = aim(rank + spread, a, b, from_a, from_b, even, 2 / 3)
    two = aim(rank - spread, a, b, from_a, from_b, even, 1 / 3)
    return one, two


@triton.jit
def narrow(rank, a, b, from_a, from_b, one, two, from_one, from_two):
    """[a, b), which holds the key of that rank, after a look at two keys in it; whether that got rid of half of it.

    Rounds that do and thirds of what is left else: at most 14 + 20 rounds, 6 to 9 where values are spread smoothly.
    """
    held = from_a - from_b
    over, under = from_two >= rank, from_one < rank
    b = tl.where(under, one, tl.where(over, b, two))
    from_b = tl.where(under, from_one, tl.where(over, from_b, from_two))
    a = tl.where(over, two, tl.where(under, a, one))
    from_a = tl.where(over, from_two, tl.where(under, from_a, from_one))
    return a, b, from_a, from_b, 2 * (from_a - from_b) <= held
