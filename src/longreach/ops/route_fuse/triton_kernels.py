# mypy: ignore-errors
"""The Triton kernels of route_fuse. Each program of it computes the second layer, some hundred products, again."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.triton_carry import next_mean

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
LOOKED_AT = tl.constexpr(128)  # rows that are searched for a sequence at once


@triton.jit
def _place(memory, entry_of, b, there, entries, g):
    """Where the carry of sequence b lies, in units of heads."""
    slot = tl.load(memory[2] + b, mask=there, other=0).to(tl.int64)
    return (slot * entries + tl.load(entry_of + b, mask=there, other=0)) * tl.num_programs(1) + g


@triton.jit
def _logit(act, weight, bias, dtype: tl.constexpr):
    return (tl.sum(act * weight.to(tl.float32), 0) + bias.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def first_layer(
    x, weight, weight_row, bias_of, out, BIASED: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, CHAINED: tl.constexpr
):
    """Program (channel of the result, row). The first BK weights are loaded as soon as the kernel before permits."""
    n, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BK)
    weights = weight + n.to(tl.int64) * weight_row
    first = tl.load(weights + i, mask=i < K, other=0.0)
    bias = tl.load(bias_of + n).to(tl.float32) if BIASED else 0.0
    if CHAINED:  # the next kernel may load its parameters; it waits for this one before it reads the result
        gdc_launch_dependents()
        gdc_wait()
    acc = first.to(tl.float32) * tl.load(x + row * K + i, mask=i < K, other=0.0).to(tl.float32)
    for at in range(BK, K, BK):
        some = at + i < K
        part = tl.load(weights + at + i, mask=some, other=0.0).to(tl.float32)
        acc += part * tl.load(x + row * K + at + i, mask=some, other=0.0).to(tl.float32)
    tl.store(out + row * tl.num_programs(0) + n, (tl.sum(acc, 0) + bias).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "sequences", "entries"])
def route_fuse(
    k, v, mixed_k, mixed_v, weights, gate, layer, decay, memory, seq_of, pos_of, rows, sequences, entries,
    LIMIT: tl.constexpr, FORGETS: tl.constexpr, ROUTED: tl.constexpr, HARD: tl.constexpr, D: tl.constexpr,
    D2: tl.constexpr, W: tl.constexpr, W2: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (n, KV head): row n, and the carry of sequence n if it has no row.

    k, v: (rows, row and head stride). layer: (hidden, weight, bias). memory: (mean, weight, slots, before, after).
    """
    n, g = tl.program_id(0), tl.program_id(1)
    d, j = tl.arange(0, D2), tl.arange(0, W2)
    some, inside = d < D, j < W
    gate_1, gate_2 = tl.load(gate).to(tl.float32), tl.load(gate + 1).to(tl.float32)
    rate = 1.0
    if FORGETS:
        logit = tl.load(decay + g).to(tl.float32)
        rate = tl.sigmoid(tl.minimum(tl.maximum(logit, -LIMIT), LIMIT))
        rate = tl.where(logit == logit, rate, logit)  # NaN stays
    if ROUTED:
        down_1 = tl.load(layer[1] + j, mask=inside, other=0.0)
        down_2 = tl.load(layer[1] + W + j, mask=inside, other=0.0)
        bias_1, bias_2 = tl.load(layer[2]), tl.load(layer[2] + 1)
    if CHAINED:  # what was read until here are parameters, which no kernel of a pass writes
        gdc_wait()
    own = tl.load(seq_of + n, mask=n < rows, other=-1).to(tl.int32)
    real = (own >= 0) & (own < sequences)
    row = n.to(tl.int64)
    key = tl.load(k[0] + row * k[1] + g.to(tl.int64) * k[2] + d, mask=some & real, other=0.0).to(tl.float32)
    value = tl.load(v[0] + row * v[1] + g.to(tl.int64) * v[2] + d, mask=some & real, other=0.0).to(tl.float32)
    held_before = _place(memory, memory[3], own, real, entries, g)
    held_after = _place(memory, memory[4], own, real, entries, g)
    goes_on = real & (tl.load(pos_of + n, mask=n < rows, other=0) != 0)  # else the carry is not read
    from_mean = memory[0] + held_before * (2 * D) + d
    mean_k = tl.load(from_mean, mask=some & goes_on, other=0.0)
    mean_v = tl.load(from_mean + D, mask=some & goes_on, other=0.0)
    held = rate * tl.load(memory[1] + held_before, mask=goes_on, other=0.0)
    lambda_1, lambda_2 = 0.5, 0.5
    if ROUTED:
        dtype: tl.constexpr = layer[0].dtype.element_ty
        hidden = tl.load(layer[0] + row * W + j, mask=inside & real, other=0.0).to(tl.float32)
        act = (hidden * tl.sigmoid(hidden)).to(dtype).to(tl.float32)
        logit_1, logit_2 = _logit(act, down_1, bias_1, dtype), _logit(act, down_2, bias_2, dtype)
        if HARD:
            lambda_1 = tl.where(logit_1 >= logit_2, 1.0, 0.0)
            lambda_2 = 1.0 - lambda_1
        else:
            top = tl.maximum(logit_1, logit_2)
            share_1, share_2 = tl.exp(logit_1 - top), tl.exp(logit_2 - top)
            lambda_1, lambda_2 = share_1 / (share_1 + share_2), share_2 / (share_1 + share_2)
    weight_1, weight_2 = 1.0 + gate_1 * (lambda_1 - 1.0), gate_2 * lambda_2
    mean_k, mean_v = next_mean(key, mean_k, held), next_mean(value, mean_v, held)
    to_mean = memory[0] + held_after * (2 * D) + d
    tl.store(to_mean, mean_k, mask=some & real)
    tl.store(to_mean + D, mean_v, mask=some & real)
    tl.store(memory[1] + held_after, 1.0 + held, mask=real)
    to = (row * tl.num_programs(1) + g) * D + d
    kind: tl.constexpr = mixed_k.dtype.element_ty
    there = some & (n < rows)
    key = weight_1 * key + weight_2 * mean_k.to(kind).to(tl.float32)
    value = weight_1 * value + weight_2 * mean_v.to(kind).to(tl.float32)
    tl.store(mixed_k + to, tl.where(real, key, 0.0).to(kind), mask=there)
    tl.store(mixed_v + to, tl.where(real, value, 0.0).to(kind), mask=there)
    tl.store(weights + row * 2, tl.where(real, weight_1, 0.0), mask=(n < rows) & (g == 0))
    tl.store(weights + row * 2 + 1, tl.where(real, weight_2, 0.0), mask=(n < rows) & (g == 0))
    if (own != n) & (n < sequences):
        found = 0
        for at in range(0, rows, LOOKED_AT):
            i = at + tl.arange(0, LOOKED_AT)
            found += tl.sum((tl.load(seq_of + i, mask=i < rows, other=-1) == n).to(tl.int32), 0)
        if found == 0:
            begin = _place(memory, memory[3], n, True, entries, g)
            end = _place(memory, memory[4], n, True, entries, g)
            for part in tl.static_range(2):
                mean = tl.load(memory[0] + begin * (2 * D) + part * D + d, mask=some)
                tl.store(memory[0] + end * (2 * D) + part * D + d, mean, mask=some)
            tl.store(memory[1] + end, tl.load(memory[1] + begin))
