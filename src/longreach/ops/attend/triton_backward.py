"""attend's backward on the GPU, through out and lse. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longreach.errors import Unsupported
from longreach.ops.attend import backward_plan as plans
from longreach.ops.attend import triton_backward_kernels as kernels
from longreach.ops.attend import triton_list_backward_kernels as list_kernels
from longreach.ops.attend.triton_tuning import INTERPRETED, next_power_of_2
from longreach.ops.partial import merge
from longreach.ops.selection import Lists, Selection, Spans, slots_seen
from longreach.ops.types import KVView, Partial, Rows


def wanted(rows: Rows, kv: KVView, selection: Selection, sink_logit: Tensor | None) -> bool:
    """Whether some input of attend needs a gradient now."""
    inputs = rows.q, kv.k, kv.v, getattr(selection, "log_weight", None), sink_logit
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def refuse(rows: Rows, kv: KVView, selection: Selection) -> None:
    """Raise Unsupported for what the backward cannot do and the forward, or the reference, can."""
    advice = "an input requires a gradient; use impl='reference', or torch.no_grad()"
    if kv.block_table is not None:
        raise Unsupported(
            f"the backward of attend's Triton kernels takes contiguous memory, not a block table; {advice}"
        )
    if kv.slot_pos is not None:
        raise Unsupported(
            f"the backward of attend's Triton kernels takes slots that are positions, not slot_pos; {advice}"
        )
    if not isinstance(selection, (Spans, Lists)):
        kind = type(selection).__name__
        raise Unsupported(f"the backward of attend's Triton kernels takes Spans and Lists, got {kind}; {advice}")
    if isinstance(selection, Lists):
        units = kv.heads if selection.per == "kv" else rows.q.shape[1]
        pairs = rows.q.shape[0] * units * selection.index.shape[2]
        if pairs >= 1 << 31:
            raise Unsupported(
                f"attend's backward numbers list entries of rows with 32 bits, got {pairs}; split the rows"
            )


class _Form(NamedTuple):
    """What the backward knows of an attend without its tensors. block: keys of an entry of the lists, 0 for spans."""

    scale: float
    softcap: float | None
    per_query: bool
    block: int


def attend(
    forward: Callable[[], Partial], rows: Rows, kv: KVView, selection: Selection, scale: float, softcap: float | None,
    sink_logit: Tensor | None,
) -> Partial:  # fmt: skip
    """The Partial that `forward` (attend without a sink) gives, with a backward. The sink is merged afterwards."""
    form = _Form(float(scale), softcap, selection.per == "query", getattr(selection, "block", 0))
    choice: tuple[Tensor, ...]
    weight = None
    if isinstance(selection, Lists):
        lists = plans.row_lists(rows, kv, selection)
        choice, weight = (lists.index, lists.count, lists.number), lists.log_weight
    else:
        assert isinstance(selection, Spans)
        choice = plans.limits_of(rows, kv, selection)
    result = Partial(
        *_Attend.apply(
            forward, form, rows.q, kv.k, kv.v, weight, rows.seq, rows.pos, slots_seen(rows, kv).int(), *choice
        )
    )
    if sink_logit is None:
        return result
    sink = sink_logit.to(result.lse.dtype).expand_as(result.lse)
    return merge(result, Partial(torch.zeros_like(result.out), sink))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[[], Partial], form: _Form, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        result = forward()
        ctx.form = form
        ctx.save_for_backward(result.out, result.lse, *tensors)
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v, weight, seq, pos, seen, *choice = ctx.saved_tensors
        _, _, needs_q, needs_k, needs_v, needs_weight, *rest = ctx.needs_input_grad
        work = _Work(ctx.form, q, k, v, seq.contiguous(), pos, seen, out, lse, dout.contiguous(), dlse.contiguous())
        with torch.cuda.device_of(q):
            if not q.shape[0]:
                dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
                dw = None if weight is None else torch.zeros_like(weight)
            elif ctx.form.block:
                lists = plans.RowLists(choice[0], choice[1], weight, choice[2])
                dq, dw = work.lists_rows(lists, needs_weight) if needs_q or needs_weight else (None, None)
                dk, dv = work.lists_keys(lists) if needs_k or needs_v else (None, None)
            else:
                limits, dw = plans.Limits(*choice), None
                tiles = plans.tiles_of_rows(seq, pos, work.shape, work.rows_at_once)
                dq = work.spans_rows(limits, tiles) if needs_q else None
                dk, dv = work.spans_keys(limits, tiles) if needs_k or needs_v else (None, None)
        return None, None, dq, dk, dv, dw, *[None] * len(rest)


class _Work:
    """One backward: its tensors as the kernels take them, and the launches."""

    def __init__(
        self, form: _Form, q: Tensor, k: Tensor, v: Tensor, seq: Tensor, pos: Tensor, seen: Tensor, out: Tensor,
        lse: Tensor, dout: Tensor, dlse: Tensor,
    ):  # fmt: skip
        count, heads, dim = q.shape
        self.form, self.k, self.v, self.seq, self.pos, self.seen = form, k, v, seq, pos, seen
        self.q = q if q.stride(2) == 1 else q.contiguous()
        self.shape = plans.Shape(k.shape[0], k.shape[1], k.shape[2])
        self.group = heads // k.shape[1]
        self.heads, self.count, self.dim, self.wide = heads, count, dim, max(16, next_power_of_2(dim))
        self.m, self.block, self.launch = backward_tuning(q.dtype, self.wide)
        self.rows_at_once = self.m // self.group
        delta = torch.empty_like(lse)
        kernels.deltas[(-(-count * heads // 16),)](
            out, dout, dlse, delta, count * heads, M=16, D=dim, BD=self.wide, num_warps=4
        )
        self.results = lse, delta, dout
        self.memory = k, k.stride()[:3], v, v.stride()[:3]
        self.logits = float(form.scale), float(form.softcap or 1.0)
        self.options = {"CAPPED": form.softcap is not None, "D": dim, "BD": self.wide, **self.launch}

    def spans_rows(self, limits: plans.Limits, tiles: Tensor) -> Tensor:
        """dq."""
        dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        kernels.spans_dq[(tiles.shape[0], self.shape.kv_heads)](
            self._rows(tiles), self.memory, limits, self.results, dq, self.heads, self.count, *self.logits,
            **self._spans(limits), **self.options,
        )  # fmt: skip
        return dq

    def spans_keys(self, limits: plans.Limits, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """dk, dv."""
        sequences, kv_heads, slots = self.shape
        ranges = plans.tile_ranges(tiles, self.seq, self.shape, limits, self.block)
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.k, self.v))
        blocks = ranges.shape[2]
        kernels.spans_dkv[(sequences * blocks, kv_heads)](
            self._rows(tiles), self.memory, limits, ranges, self.results, dk, dv, dk.stride()[:2], self.heads,
            self.count, sequences, blocks, slots, *self.logits, **self._spans(limits), **self.options,
        )  # fmt: skip
        return dk, dv

    def lists_rows(self, lists: plans.RowLists, learnt: bool) -> tuple[Tensor, Tensor | None]:
        """dq, and the gradient of log-weights if `learnt`."""
        dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        room, units = lists.index.shape[2], lists.number.shape[1]
        keys, parts = self._parts()
        dw = dq.new_zeros((self.count, units, room, parts) if learnt else (1,), dtype=torch.float32)
        width = self.heads // units
        list_kernels.lists_dq[(self.count * units,)](
            self._listed(), self.memory, self._lists(lists), self.results, dq, dw, self.heads, *self.logits,
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

    def lists_keys(self, lists: plans.RowLists) -> tuple[Tensor, Tensor]:
        """dk, dv: of rows whose lists overflowed first, as of a span, then of all entries."""
        limits = plans.overflow_limits(lists, self.seen)
        dk, dv = self.spans_keys(limits, plans.tiles_of_rows(self.seq, self.pos, self.shape, self.rows_at_once))
        room, units = lists.index.shape[2], lists.number.shape[1]
        order, first = plans.sorted_pairs(lists, self.seq, self.seen, self.shape, self.form.block)
        keys, parts = self._parts()
        sequences, kv_heads, slots = self.shape
        blocks = -(-slots // self.form.block)
        width = self.heads // units
        list_kernels.lists_dkv[(sequences * blocks * parts, kv_heads)](
            self._listed(), self.memory, self._lists(lists), (order, first), self.results, dk, dv, dk.stride()[:2],
            self.heads, kv_heads, blocks, slots, *self.logits, A=units, C=room, WIDTH=width, BLOCK=self.form.block,
            SUBS=parts, WEIGHTED=lists.log_weight is not None, T=self.m // width, M=self.m, BN=keys, **self.options,
        )  # fmt: skip
        return dk, dv

    def _parts(self) -> tuple[int, int]:
        """Keys of a part of a list's block, and parts."""
        keys = min(self.block, max(16, next_power_of_2(self.form.block)))
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
            "SPANS": spans, "AXIS": axis, "PER_QUERY": self.form.per_query, "T": self.rows_at_once,
            "GROUP": self.group, "M": self.m, "BN": self.block,
        }  # fmt: skip


def backward_tuning(dtype: torch.dtype, wide: int) -> tuple[int, int, dict[str, int]]:
    """(rows x heads of a tile, keys of a block, launch options) for head dim `wide`. Not yet measured."""
    if INTERPRETED:
        return 16, 16, {"STAGES": 1, "num_warps": 1}
    vector = wide * dtype.itemsize
    if vector <= 256:
        return 64, 64, {"STAGES": 2, "num_warps": 4}
    return 32, 32, {"STAGES": 1, "num_warps": 4}
