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

PARTS_BYTES = 1 << 11 if INTERPRETED else 1 << 29  # of the parts that pairs leave: rows are taken in chunks of as many
PROGRAMS = 3 if INTERPRETED else 1024  # among which a chunk's pairs are shared


def takes(block: int, weighted: bool) -> bool:
    """Whether lists are attended to block by block: blocks long enough to fill a tile of the tensor cores, and no
    log-weights."""
    return block >= 16 and not weighted


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a problem. pairs: their lists' entries, sorted by block: (keys int32, order, first int32)."""

    rows: slice
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
        self.of_list = {
            "A": self.units, "C": self.room, "WIDTH": self.width, "BLOCK": block, "SUBS": self.parts,
        }  # fmt: skip
        wide = next_power_of_2(self.width)
        self.by_pair = {"T": problem.m // self.width, "M": problem.m, "BN": self.keys, **self.of_list, **problem.options}
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
                q, strides, seen, p.memory, chunk.pairs, parts, size, p.shape.kv_heads, self.blocks, self.most,
                *p.logits, **self.by_pair,
            )  # fmt: skip
            kernels.pairs_merge[(seen.shape[0] * self.units,)](
                seen, self._listed(chunk.lists), parts, out[some], lse[some], p.heads, **self.by_row
            )
        units = p.count * self.units
        kernels.over_forward[(-(-units // self.by_overflow["N"]),)](
            p.q, p.q.stride()[:2], p.seq, p.seen, p.memory, self._listed(self.lists), out, lse, units, p.heads,
            *p.logits, **self.by_overflow,
        )  # fmt: skip
        return out, lse

    def backward(self, results: Results) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        p = self.p
        chunks = -(-p.count // self._rows_at_once)
        dq = torch.empty_like(p.q, memory_format=torch.contiguous_format)
        dtype = p.k.dtype if chunks == 1 else torch.float32
        dk, dv = (torch.zeros(p.k.shape, dtype=dtype, device=p.k.device) for _ in range(2))
        over = self._overflowed()
        for number, chunk in enumerate(self._chunks()):
            some, size, last = chunk.rows, self._size(chunk), number == chunks - 1
            programs = -(-chunk.count // size)
            work = dq.new_empty((2 * programs, self.parts, 2, self.keys, p.q.shape[2]), dtype=torch.float32)
            parts, mine = self._parts(chunk), Results(*(x[some] for x in results))
            q, strides, seen = p.q[some], p.q.stride()[:2], p.seen[some]
            backward.pairs_backward[(programs, self.parts)](
                q, strides, seen, p.memory, chunk.pairs, mine, parts, dk, dv, dk.stride()[:2], work, size, p.heads,
                p.shape.kv_heads, self.blocks, self.most, p.shape.slots, *p.logits, **self.by_pair,
            )  # fmt: skip
            backward.blocks_sum[(self.most * self.parts,)](
                p.q, strides, p.seq, p.seen, p.memory, chunk.pairs[2], work, over, results, dk, dv, dk.stride()[:2],
                size, p.heads, p.shape.kv_heads, self.blocks, p.shape.slots, *p.logits, OVER=last, GROUP=p.group,
                **{name: x for name, x in self.by_pair.items() if name != "C"},
            )  # fmt: skip
            backward.pairs_dq[(seen.shape[0] * self.units,)](
                seen, self._listed(chunk.lists), parts, dq[some], p.heads, p.logits[0], **self.by_row
            )
        units = p.count * self.units
        backward.over_dq[(-(-units // self.by_overflow["N"]),)](
            p.q, p.q.stride()[:2], p.seq, p.seen, p.memory, self._listed(self.lists), results, dq, units, p.heads,
            *p.logits, **self.by_overflow,
        )  # fmt: skip
        return dq, dk.to(p.k.dtype), dv.to(p.k.dtype)

    @property
    def _rows_at_once(self) -> int:
        of_row = self.units * self.room * self.parts * self.width * self.p.q.shape[2] * self.p.q.element_size()
        return max(1, PARTS_BYTES // max(1, of_row))

    def _chunks(self) -> Iterator[_Chunk]:
        at_once = self._rows_at_once
        for start in range(0, self.p.count, at_once):
            some = slice(start, min(start + at_once, self.p.count))
            lists = replace(self.lists, number=self.lists.number[some])
            yield _Chunk(some, lists, self._sorted(some, lists), lists.number.numel() * self.room)

    def _sorted(self, some: slice, lists: RowLists) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs by sequence, KV head and block, then by row: keys, their order, and where those of each block begin."""
        p, count = self.p, lists.number.numel() * self.room
        keys = torch.empty(count, dtype=torch.int32, device=p.q.device)
        kernels.pair_keys[(-(-count // 1024),)](
            (lists.index, lists.count, lists.number), p.seq[some], p.seen[some], keys, count, p.shape.kv_heads,
            self.blocks, self.most, A=self.units, C=self.room, WIDTH=self.width, GROUP=p.group, BLOCK=p.form.block,
            N=1024,
        )  # fmt: skip
        keys, order = keys.sort(stable=True)
        edges = torch.arange(self.most + 1, dtype=torch.int32, device=keys.device)
        return keys, order, torch.searchsorted(keys, edges, out_int32=True)

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
