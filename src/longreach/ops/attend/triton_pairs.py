"""Launches of attention over lists of blocks, block by block: forward and backward. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longreach.ops.attend import triton_pair_backward_kernels as backward
from longreach.ops.attend import triton_pair_kernels as kernels
from longreach.ops.attend.backward_plan import RowLists
from longreach.ops.attend.triton_backward_launches import Problem, Results
from longreach.ops.attend.triton_tuning import INTERPRETED, next_power_of_2

PARTS_BYTES = 1 << 11 if INTERPRETED else 1 << 30  # of the parts that pairs leave: a chunk has as many
PROGRAMS = 3 if INTERPRETED else 1024  # among which a chunk's pairs are shared


def takes(block: int, weighted: bool) -> bool:
    """Whether lists are attended to block by block: blocks long enough to fill a tile of the tensor cores, and no
    log-weights."""
    return block >= 16 and not weighted


@dataclass(frozen=True)
class _Chunk:
    """Some rows and units of a problem. pairs: their lists' entries, sorted by block: (keys int32, order, first)."""

    rows: slice
    unit: int  # the first one
    units: int
    lists: RowLists
    pairs: tuple[Tensor, Tensor, Tensor]
    count: int  # pairs, unused entries too


class Pairs:
    """The launches for one attend. lists without log-weights."""

    def __init__(self, problem: Problem, lists: RowLists):
        self.p, self.lists = problem, lists
        self.units, self.room = lists.number.shape[1], lists.index.shape[2]
        self.width = problem.heads // self.units
        block = problem.form.block
        self.keys = min(problem.keys, max(16, next_power_of_2(block)))
        self.parts = -(-block // self.keys)
        sequences, kv_heads, slots = problem.shape
        self.blocks = -(-slots // block)
        self.most = sequences * kv_heads * self.blocks
        self.of_list = {"C": self.room, "WIDTH": self.width, "BLOCK": block, "SUBS": self.parts}
        wide = next_power_of_2(self.width)
        self.by_pair = {
            "T": problem.m // self.width,
            "M": problem.m,
            "BN": self.keys,
            **self.of_list,
            **problem.options,
        }
        at_once = max(1, min(next_power_of_2(self.room * self.parts), 32 // wide))
        self.by_row = {"WIDE": wide, "U": at_once, **self.of_list, **problem.sizes,
                       "num_warps": 1 if INTERPRETED else 2}  # fmt: skip
        self.by_overflow = {
            "A": self.units, "C": self.room, "WIDTH": self.width, "GROUP": problem.group, "N": 256, "M": max(16, wide),
            "BN": 16, "CAPPED": problem.form.softcap is not None, **problem.sizes, "num_warps": 1 if INTERPRETED else 4,
        }  # fmt: skip

    def forward(self) -> tuple[Tensor, Tensor]:
        """out [R, H, D] and lse [R, H], fp32."""
        p = self.p
        out = torch.empty(p.q.shape, dtype=torch.float32, device=p.q.device)
        lse = out.new_empty(out.shape[:2])
        for chunk in self._chunks():
            some, size = chunk.rows, self._size(chunk)
            parts = self._parts(chunk), lse.new_empty(chunk.count * self.parts * self.width)
            q, strides, seen = p.q[some], p.q.stride()[:2], p.seen[some]
            kernels.pairs_forward[(-(-chunk.count // size), self.parts)](
                q, strides, seen, p.memory, chunk.pairs, parts, size, chunk.unit, p.shape.kv_heads, self.blocks,
                self.most, *p.logits, A=chunk.units, **self.by_pair,
            )  # fmt: skip
            kernels.pairs_merge[(seen.shape[0] * chunk.units,)](
                seen, self._listed(chunk.lists), parts, out[some], lse[some], chunk.unit, p.heads, A=chunk.units,
                **self.by_row,
            )  # fmt: skip
        every = p.count * self.units
        kernels.over_forward[(-(-every // self.by_overflow["N"]),)](
            p.q, p.q.stride()[:2], p.seq, p.seen, p.memory, self._listed(self.lists), out, lse, every, p.heads,
            *p.logits, **self.by_overflow,
        )  # fmt: skip
        return out, lse

    def backward(self, results: Results) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        p = self.p
        rows, units = self._at_once
        at_once = rows >= p.count and (units >= self.units or self.units <= p.shape.kv_heads)
        dq = torch.empty_like(p.q, memory_format=torch.contiguous_format)
        dtype = p.k.dtype if at_once else torch.float32  # else several chunks add to a block
        dk, dv = (torch.zeros(p.k.shape, dtype=dtype, device=p.k.device) for _ in range(2))
        over = self._overflowed()
        for number, chunk in enumerate(self._chunks()):
            some, size = chunk.rows, self._size(chunk)
            programs = -(-chunk.count // size)
            work = dq.new_empty((2 * programs, self.parts, 2, self.keys, p.q.shape[2]), dtype=torch.float32)
            parts, mine = self._parts(chunk), Results(*(x[some] for x in results))
            q, strides, seen = p.q[some], p.q.stride()[:2], p.seen[some]
            backward.pairs_backward[(programs, self.parts)](
                q, strides, seen, p.memory, chunk.pairs, mine, parts, dk, dv, dk.stride()[:2], work, size,
                chunk.unit, p.heads, p.shape.kv_heads, self.blocks, self.most, p.shape.slots, *p.logits,
                A=chunk.units, **self.by_pair,
            )  # fmt: skip
            backward.blocks_sum[(self.most * self.parts,)](
                p.q, strides, p.seq, p.seen, p.memory, chunk.pairs[2], work, over, results, dk, dv, dk.stride()[:2],
                size, p.heads, p.shape.kv_heads, self.blocks, p.shape.slots, *p.logits, OVER=not number,
                A=self.units, GROUP=p.group, **{name: x for name, x in self.by_pair.items() if name != "C"},
            )  # fmt: skip
            backward.pairs_dq[(seen.shape[0] * chunk.units,)](
                seen, self._listed(chunk.lists), parts, dq[some], chunk.unit, p.heads, p.logits[0], A=chunk.units,
                **self.by_row,
            )  # fmt: skip
        every = p.count * self.units
        backward.over_dq[(-(-every // self.by_overflow["N"]),)](
            p.q, p.q.stride()[:2], p.seq, p.seen, p.memory, self._listed(self.lists), results, dq, every, p.heads,
            *p.logits, **self.by_overflow,
        )  # fmt: skip
        return dq, dk.to(p.k.dtype), dv.to(p.k.dtype)

    @property
    def _at_once(self) -> tuple[int, int]:
        """Rows and units of a chunk: all rows if one unit's parts fit, so that a block has all of its rows at once."""
        each = self.room * self.parts * self.width * self.p.q.shape[2] * self.p.q.element_size()
        rows = max(1, min(self.p.count, PARTS_BYTES // max(1, each)))
        return rows, max(1, min(self.units, PARTS_BYTES // max(1, rows * each)))

    def _chunks(self) -> Iterator[_Chunk]:
        rows, units = self._at_once
        for start in range(0, self.p.count, rows):
            some = slice(start, min(start + rows, self.p.count))
            for unit in range(0, self.units, units):
                lists = replace(self.lists, number=self.lists.number[some, unit : unit + units].contiguous())
                yield self._chunk(some, unit, lists)

    def _chunk(self, some: slice, unit: int, lists: RowLists) -> _Chunk:
        """With its pairs by sequence, KV head and block, then by row: keys, order, where those of each block begin."""
        p, count, units = self.p, lists.number.numel() * self.room, lists.number.shape[1]
        keys = torch.empty(count, dtype=torch.int32, device=p.q.device)
        kernels.pair_keys[(-(-count // 1024),)](
            (lists.index, lists.count, lists.number), p.seq[some], p.seen[some], keys, count, unit,
            p.shape.kv_heads, self.blocks, self.most, A=units, C=self.room, WIDTH=self.width, GROUP=p.group,
            BLOCK=p.form.block, N=1024,
        )  # fmt: skip
        keys, order = keys.sort(stable=True)
        edges = torch.arange(self.most + 1, dtype=torch.int32, device=keys.device)
        first = torch.searchsorted(keys, edges, out_int32=True)
        return _Chunk(some, unit, units, lists, (keys, order, first), count)

    def _overflowed(self) -> tuple[Tensor, Tensor]:
        """Rows and units whose lists overflowed: their numbers row * A + unit in order, and how many there are."""
        over = (self.lists.each(self.lists.count) > self.room).flatten()
        place = over.cumsum(0)
        numbers = torch.empty(len(over) + 1, dtype=torch.int64, device=over.device)
        which = torch.arange(len(over), device=over.device)
        return numbers.scatter_(0, torch.where(over, place - 1, len(over)), which), place[-1:]

    def _size(self, chunk: _Chunk) -> int:
        """Pairs of a program: whole tiles."""
        tile = self.p.m // self.width
        return max(2, -(-chunk.count // (PROGRAMS * tile))) * tile

    def _parts(self, chunk: _Chunk) -> Tensor:
        """Room for what pairs leave, with the dtype of q."""
        return self.p.q.new_empty(chunk.count * self.parts * self.width * self.p.q.shape[2])

    @staticmethod
    def _listed(lists: RowLists) -> tuple[Any, ...]:
        return lists.index, lists.count, lists.number
