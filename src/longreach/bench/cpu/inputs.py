"""Inputs of one decode row: keys with a component that all share, queries that agree in part, and hash tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longreach.bench.sampling_inputs import draw_sequence
from longreach.methods.magicpig import MagicPIG
from longreach.ops import KVView, Rows
from longreach.ops.simhash import HashTables, build, codes, projections

SINKS, LOCAL, CENTRE = MagicPIG.sinks, MagicPIG.local, MagicPIG.centre  # the method's defaults
CHUNK = 4096  # keys hashed at a time


@dataclass(frozen=True)
class Shape:
    """One row of `heads` query heads over `context` keys."""

    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: str = "bfloat16"

    @property
    def dense_bytes(self) -> int:
        """Bytes of all keys and values."""
        return 2 * self.kv_heads * self.context * self.dim * getattr(torch, self.dtype).itemsize

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.dim)


@dataclass(frozen=True)
class Preset:
    """MagicPIG's options: signs in a code, tables, and how the query heads of a KV head share samples."""

    bits: int
    tables: int
    share: str

    @property
    def name(self) -> str:
        return f"({self.bits},{self.tables}) {self.share}"


class Problem:
    """rows: one, the last of the context. kv: its keys and values, in memory of NumPy, which asks for huge pages."""

    def __init__(self, shape: Shape, seed: int):
        self.shape, self.seed = shape, seed
        heads, context, dim = shape.kv_heads, shape.context, shape.dim
        dtype = getattr(torch, shape.dtype)
        k, v = (huge((1, heads, context, dim), dtype) for _ in "kv")
        q = draw_sequence(k[0], v[0], shape.heads // heads, torch.Generator().manual_seed(seed))
        self.kv = KVView(k, v, torch.tensor([context]))
        self.rows = Rows(q.to(dtype).view(1, shape.heads, dim), torch.tensor([0]), torch.tensor([context - 1]))
        self.centre = k[:, :, SINKS : SINKS + CENTRE].float().mean(2)

    def tables(self, bits: int, tables: int, impl: str) -> tuple[Tensor, HashTables]:
        """(directions, the tables of all keys but sinks and local ones)."""
        shape, directions = self.shape, projections(self.shape.dim, bits, tables, self.seed)
        made = HashTables.empty(1, shape.kv_heads, shape.context, bits=bits, tables=tables, first=SINKS)
        seq, stop = torch.tensor([0]), shape.context - LOCAL
        for begin in range(0, stop, made.size):
            found = []
            first, end = max(begin, SINKS), min(begin + made.size, stop)
            for at in range(first, end, CHUNK):
                keys = self.kv.k[0, :, at : min(at + CHUNK, end)].transpose(0, 1)
                found.append(codes(keys, directions, centre=self.centre[0], impl=impl).view(torch.int16))
            all_ = torch.cat(found).view(torch.uint16)[None]
            build(made, all_, seq, torch.tensor([end - first]), impl=impl)
        return directions, made


def huge(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory of NumPy."""
    return torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
