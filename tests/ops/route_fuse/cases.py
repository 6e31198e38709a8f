"""Rows of a decode step: every order of rows and slots, padding, sequences without rows, memory that is not theirs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.mka.config import EDGE
from longreach.ops.carry import CarryMemory
from longreach.ops.route_fuse import RouterLayer, route_fuse
from tests.ops.attend.kernels import here

SLOTS, ENTRIES = 7, 3
SEQ = [3, -1, 0, 1, -1, 4]  # sequence 2 has no row
POS = [9, 0, 0, 4, 7, 1]  # sequence 0 starts
ROUTINGS = ("learned", "fixed", "top1")


class Case(NamedTuple):
    """Arguments of `route_fuse`."""

    k: Tensor
    v: Tensor
    router: RouterLayer
    decay: Tensor | None
    seq: Tensor
    pos: Tensor
    memory: CarryMemory


class Result(NamedTuple):
    k: Tensor
    v: Tensor
    weights: Tensor
    mean: Tensor
    weight: Tensor


def case(*, heads: int = 2, dim: int = 8, width: int = 5, dtype: torch.dtype = torch.float32, routing: str = "learned",
         forgets: bool = True, gate: float = 0.7) -> Case:  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    slots, before, after = torch.tensor([[5, 0, 3, 6, 1], [2, 0, 1, 0, 1], [0, 1, 0, 1, 1]])  # of 4: one entry
    mean = torch.full((SLOTS, ENTRIES, heads, 2 * dim), torch.nan, dtype=wide)
    weight = torch.full(mean.shape[:3], torch.nan, dtype=wide)
    own = slots[1:], before[1:]  # what sequence 0 had before it starts is not read
    mean[own] = random(4, heads, 2 * dim).to(wide)
    weight[own] = 1 + 4 * random(4, heads).abs().to(wide)
    layer: tuple[Any, ...] = (random(len(SEQ), width), random(2, width), random(2), routing == "top1")
    layer[0][1] = torch.nan  # of padding
    gates = torch.tensor([gate, gate / 2], dtype=dtype)
    router = RouterLayer(gates) if routing == "fixed" else RouterLayer(gates, *layer)
    decay = torch.linspace(-20, 20, heads).to(dtype) if forgets else None
    kv = random(2, len(SEQ), heads, dim)
    kv[:, 1] = torch.nan
    memory = CarryMemory(mean, weight, slots, before, after)
    return Case(kv[0], kv[1], router, decay, torch.tensor(SEQ), torch.tensor(POS), memory)


def wide(some: Case) -> Case:
    """The same numbers in fp64."""

    def double(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.double()
        if isinstance(x, (RouterLayer, CarryMemory)):
            return type(x)(**{name: double(value) for name, value in vars(x).items()})
        return x

    return Case(*(double(x) for x in some))


def run(some: Case, impl: str) -> Result:
    """What the op returns and leaves in a copy of the memory, on the CPU."""
    memory = CarryMemory(**{name: here(x.clone()) for name, x in vars(some.memory).items()})
    found = route_fuse(*(here(x) for x in some[:-1]), memory, limit=EDGE, impl=impl)  # type: ignore[arg-type]
    return Result(*(x.cpu() for x in (*found, memory.mean, memory.weight)))
