"""Launches of attend's backward on the GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.ops.attend import backward_plan as plans
from longreach.ops.attend import triton_backward_kernels as kernels
from longreach.ops.attend import triton_list_backward_kernels as list_kernels
from longreach.ops.attend.triton_tuning import INTERPRETED, next_power_of_2
from longreach.ops.types import RowRange

PROGRAMS = 0 if INTERPRETED else 1024  # blocks of keys are split by rows until there are about as many
MOST_SPLITS = 8


class Form(NamedTuple):
    """What the backward knows of an attend without its tensors. block: keys of an entry of the lists, 0 for spans;
    runs: as Rows has them."""

    scale: float
    softcap: float | None
    per_query: bool
    block: int
    runs: tuple[RowRange, ...] | None = None


class Results(NamedTuple):
    """What the backward takes of the forward: lse and delta fp32 [R, H], dout [R, H, D] with the dtype of q."""

    lse: Tensor
    delta: Tensor
    dout: Tensor


class Problem:
    """The tensors of one attend as the kernels take them, and the launches."""

    def __init__(self, form: Form, q: Tensor, k: Tensor, v: Tensor, seq: Tensor, pos: Tensor, seen: Tensor):
        count, heads, dim = q.shape
        self.form, self.k, self.v, self.pos = form, k, v, pos
        self.seq, self.seen = seq.contiguous(), seen
        self.q = q if q.stride(2) == 1 else q.contiguous()
        self.shape = plans.Shape(k.shape[0], k.shape[1], k.shape[2])
        self.heads, self.count, self.group = heads, count, heads // k.shape[1]
        wide = max(16, next_power_of_2(dim))
        self.m, self.keys, launch = backward_tuning(q.dtype, wide)
        self.memory = k, k.stride()[:3], v, v.stride()[:3]
        self.logits = float(form.scale), float(form.softcap or 1.0)
        self.sizes = {"D": dim, "BD": wide}
        self.options = {"CAPPED": form.softcap is not None, **self.sizes, **launch}

    def results(self, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor) -> Results:
        """With delta = sum_d dout out - dlse."""
        delta, dout, half = torch.empty_like(lse), dout.contiguous(), self.q.dtype != torch.float32
        rounded = torch.empty_like(dout, dtype=self.q.dtype) if half else dout
        kernels.deltas[(-(-lse.numel() // 16),)](
            out, dout, dlse.contiguous(), delta, rounded, lse.numel(), ROUNDED=half, M=16, **self.sizes,
            num_warps=1 if INTERPRETED else 4,
        )  # fmt: skip
        return Results(lse, delta, rounded)

    def spans_rows(self, results: Results, limits: plans.Limits) -> Tensor:
        """dq."""
        tiles = self._tiles(self.group)
        dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        kernels.spans_dq[(tiles.shape[0], self.shape.kv_heads)](
            self._rows(tiles), self.memory, limits, results, dq, self.heads, self.count, *self.logits,
            **self._spans(limits), **self.options,
        )  # fmt: skip
        return dq

    def spans_keys(self, results: Results, limits: plans.Limits) -> tuple[Tensor, Tensor]:
        """dk, dv."""
        sequences, kv_heads, slots = self.shape
        tiles = self._tiles(self.group)
        ranges = plans.tile_ranges(tiles, self.seq, self.shape, limits, self.keys)
        blocks = ranges.shape[2]
        splits = max(1, min(MOST_SPLITS, PROGRAMS // max(1, sequences * blocks * kv_heads)))
        dtype = self.k.dtype if splits == 1 else torch.float32
        both = [torch.empty(splits, *self.k.shape, dtype=dtype, device=self.k.device) for _ in range(2)]
        kernels.spans_dkv[(sequences * blocks, kv_heads, splits)](
            self._rows(tiles), self.memory, limits, ranges, results, *both, both[0].stride()[1:3], self.heads,
            self.count, sequences, blocks, slots, *self.logits, **self._spans(limits), **self.options,
        )  # fmt: skip
        dk, dv = (x[0] if splits == 1 else x.sum(0).to(self.k.dtype) for x in both)
        return dk, dv

    def lists_rows(self, results: Results, lists: plans.RowLists, learnt: bool) -> tuple[Tensor, Tensor | None]:
        """dq, and the gradient of log-weights if `learnt`."""
        dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        room, units = lists.index.shape[2], lists.number.shape[1]
        keys, parts = self._parts()
        dw = dq.new_zeros((self.count, units, room, parts) if learnt else (1,), dtype=torch.float32)
        width = self.heads // units
        list_kernels.lists_dq[(self.count * units,)](
            self._listed(), self.memory, self._lists(lists), results, dq, dw, self.heads, *self.logits,
            A=units, C=room, WIDTH=width, GROUP=self.group, BLOCK=self.form.block, SUBS=parts,
            WEIGHTED=lists.log_weight is not None, LEARNT=learnt, M=max(16, next_power_of_2(width)), BN=keys,
            **self.options,
        )  # fmt: skip
        if lists.log_weight is None or not learnt:
            return dq, None
        weight = torch.zeros_like(lists.log_weight, dtype=torch.float32, memory_format=torch.contiguous_format)
        # on a GPU accumulation sorts its indices: the same bits each time
        weight.flatten(0, 1).index_put_((lists.number.long().flatten(),), dw.sum(-1).flatten(0, 1), accumulate=True)
        return dq, weight.to(lists.log_weight.dtype)

    def lists_keys(self, results: Results, lists: plans.RowLists) -> tuple[Tensor, Tensor]:
        """dk, dv: of rows whose lists overflowed first, as of a span, then of all entries."""
        limits = plans.overflow_limits(lists, self.seen)
        dk, dv = self.spans_keys(results, limits)
        room, units = lists.index.shape[2], lists.number.shape[1]
        order, first = plans.sorted_pairs(lists, self.seq, self.seen, self.shape, self.form.block)
        keys, parts = self._parts()
        sequences, kv_heads, slots = self.shape
        blocks = -(-slots // self.form.block)
        width = self.heads // units
        list_kernels.lists_dkv[(sequences * blocks * parts, kv_heads)](
            self._listed(), self.memory, self._lists(lists), (order, first), results, dk, dv, dk.stride()[:2],
            self.heads, kv_heads, blocks, slots, *self.logits, A=units, C=room, WIDTH=width, BLOCK=self.form.block,
            SUBS=parts, WEIGHTED=lists.log_weight is not None, T=self.m // width, M=self.m, BN=keys, **self.options,
        )  # fmt: skip
        return dk, dv

    def _tiles(self, width: int) -> Tensor:
        """Tiles of rows of `width` query heads each, at most `m` rows x heads."""
        return plans.tiles_of_rows(self.seq, self.pos, self.shape, self.m // width, self.form.runs)

    def _parts(self) -> tuple[int, int]:
        """Keys of a part of a list's block, and parts."""
        keys = min(self.keys, max(16, next_power_of_2(self.form.block)))
        return keys, -(-self.form.block // keys)

    def _rows(self, tiles: Tensor) -> tuple[Any, ...]:
        return self.q, *self.q.stride()[:2], self.seq, tiles

    def _listed(self) -> tuple[Any, ...]:
        return self.q, *self.q.stride()[:2], self.seq, self.seen

    def _lists(self, lists: plans.RowLists) -> tuple[Tensor, ...]:
        weight = lists.index if lists.log_weight is None else lists.log_weight.contiguous()
        return lists.index, lists.count, weight, lists.number

    def _spans(self, limits: plans.Limits) -> dict[str, Any]:
        spans, _, axis = limits.low.shape
        return {
            "SPANS": spans, "AXIS": axis, "PER_QUERY": self.form.per_query, "T": self.m // self.group,
            "GROUP": self.group, "M": self.m, "BN": self.keys,
        }  # fmt: skip


def backward_tuning(dtype: torch.dtype, wide: int) -> tuple[int, int, dict[str, int]]:
    """(rows x heads of a tile, keys of a block, launch options) for head dim `wide`. Not yet measured."""
    if INTERPRETED:
        return 16, 16, {"STAGES": 1, "num_warps": 1}
    vector = wide * dtype.itemsize
    if vector <= 256:
        return 64, 64, {"STAGES": 2, "num_warps": 4}
    return 32, 32, {"STAGES": 1, "num_warps": 4}
