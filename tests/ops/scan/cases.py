"""Packed rows with padding, several documents and a carry; the running mean by its definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longreach.ops.scan import ScanCarry, scan
from tests.ops.attend.kernels import here

SEQ = [-1] * 2 + [0] * 3 + [2] * 20 + [1] * 10 + [3] + [-1] * 2
POS = [0, 0, 5, 6, 7, *range(4, 9), *range(15), *range(10), 0, 0, 9]  # sequences 0 and 2 go on; 2 holds two documents


class Case(NamedTuple):
    """x [R, G, D], decay [G], seq, pos, carry of 5 sequences, of which the last has no rows."""

    x: Tensor
    decay: Tensor
    seq: Tensor
    pos: Tensor
    carry: ScanCarry


def case(*, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    draw = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(len(SEQ), heads, dim, generator=draw, dtype=torch.float64).to(dtype)
    mean = torch.randn(5, heads, dim, generator=draw, dtype=torch.float64).to(wide)
    weight = (1 + 4 * torch.rand(5, heads, generator=draw, dtype=torch.float64)).to(wide)
    weight[0, 0], mean[0, 0] = 0, 0  # an empty carry of one head
    decay = torch.rand(heads, generator=draw, dtype=torch.float64).mul(0.9).add(0.05).to(wide)
    return Case(x, decay, torch.tensor(SEQ), torch.tensor(POS), ScanCarry(mean, weight))


def wide(some: Case) -> Case:
    """The same numbers in fp64."""
    carry = ScanCarry(some.carry.mean.double(), some.carry.weight.double())
    return Case(some.x.double(), some.decay.double(), some.seq, some.pos, carry)


def brute(some: Case, *, forgets: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the mean and weight after the rows, fp64: one weighted sum for each row."""
    x, decay, seq, pos, carry = wide(some)
    decay = decay if forgets else torch.ones_like(decay)
    y, mean, weight = torch.zeros_like(x), carry.mean.clone(), carry.weight.clone()
    for r, b in enumerate(seq.tolist()):
        if b < 0:
            continue
        start = r
        while int(pos[start]) != 0 and start > 0 and int(seq[start - 1]) == b:
            start -= 1
        for g, rate in enumerate(decay.tolist()):
            terms = [(rate ** (r - n), x[n, g]) for n in range(start, r + 1)]
            if int(pos[start]) != 0:
                terms.append((float(carry.weight[b, g]) * rate ** (r + 1 - start), carry.mean[b, g]))
            weight[b, g] = sum(w for w, _ in terms)
            y[r, g] = mean[b, g] = sum(w * z for w, z in terms) / weight[b, g]
    return y, mean, weight


def run(some: Case, impl: str, *, forgets: bool = True) -> tuple[Tensor, ...]:
    """y, mean, weight and the gradients of x, the carry's mean and weight, and the decay if it forgets, on the CPU."""
    x, decay, mean, weight = (
        here(t).clone().requires_grad_() for t in (some.x, some.decay, *vars(some.carry).values())
    )
    y, after = scan(x, decay if forgets else None, here(some.seq), here(some.pos), ScanCarry(mean, weight), impl=impl)
    results = y, after.mean, after.weight
    leaves = (x, mean, weight, decay) if forgets else (x, mean, weight)
    draw = torch.Generator().manual_seed(1)
    given = [here(torch.randn(t.shape, generator=draw).to(t.dtype)) for t in results]
    return tuple(t.detach().cpu() for t in (*results, *torch.autograd.grad(results, leaves, given)))


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Within the rounding of sums of as many terms as there are rows, and of the data's dtype."""
    unit = 32 * len(SEQ) * 2.0**-24 + (0.0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=unit * float(want.abs().max()))
