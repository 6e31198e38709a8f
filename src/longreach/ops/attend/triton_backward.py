"""attend's backward on the GPU, through out and lse. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longreach.errors import Unsupported
from longreach.ops.attend import backward_plan as plans
from longreach.ops.attend import triton_pairs as pairs
from longreach.ops.attend.triton_backward_launches import Form, Problem, Results
from longreach.ops.attend.triton_tuning import INTERPRETED
from longreach.ops.checks import refuse_wide
from longreach.ops.partial import merge
from longreach.ops.selection import Lists, Selection, Spans, slots_seen
from longreach.ops.types import KVView, Partial, Rows


def wanted(rows: Rows, kv: KVView, selection: Selection, sink_logit: Tensor | None) -> bool:
    """Whether some input of attend needs a gradient now."""
    inputs = rows.q, kv.k, kv.v, getattr(selection, "log_weight", None), sink_logit
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def refuse(rows: Rows, kv: KVView, selection: Selection) -> None:
    """Raise Unsupported for what the backward cannot do and the forward, or the reference, can."""
    refuse_wide("the backward of attend", rows, kv)
    pairs = 0
    if isinstance(selection, Lists):
        units = kv.heads if selection.per == "kv" else rows.q.shape[1]
        pairs = rows.q.shape[0] * units * selection.index.shape[2]
    for refused, message in (
        (kv.block_table is not None, "takes contiguous memory, not a block table"),
        (kv.slot_pos is not None, "takes slots that are positions, not slot_pos"),
        (not isinstance(selection, (Spans, Lists)), f"takes Spans and Lists, got {type(selection).__name__}"),
        (pairs >= 1 << 31, f"takes fewer than 2^31 list entries of all rows and heads, got {pairs}"),
    ):
        if refused:
            raise Unsupported(
                f"the backward of attend's Triton kernels {message}; an input requires a gradient; "
                f"use impl='reference', or torch.no_grad()"
            )


MANY = 1 << 30 if INTERPRETED else 2048  # rows from which lists of blocks are attended to block by block


def by_block(rows: Rows, kv: KVView, selection: Lists) -> bool:
    """Whether attend without a gradient goes block by block, as with one: for many rows with lists of their own."""
    if rows.q.shape[0] < MANY or selection.row_to_list is not None:
        return False
    plain = kv.block_table is None and kv.slot_pos is None
    return plain and pairs.takes(selection.block, selection.log_weight is not None)


def attend_by_block(rows: Rows, kv: KVView, selection: Lists, scale: float, softcap: float | None) -> Partial:
    given = Given.of(lambda: Partial.empty(*rows.q.shape), rows, kv, selection, scale, softcap)
    return Partial(*compute(given.forward, given.form, None, *given.tensors))


class Given(NamedTuple):
    """An attend as its autograd functions take it. tensors: q, k, v, seq, pos, seen, and the selection's own.

    forward: attend without a gradient and without a sink. learnt: log-weights of a list, or None.
    """

    forward: Callable[[], Partial]
    form: Form
    learnt: Tensor | None
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, forward: Callable[[], Partial], rows: Rows, kv: KVView, selection: Selection, scale: float,
           softcap: float | None) -> Given:  # fmt: skip
        """selection: Spans or Lists."""
        choice: tuple[Tensor, ...]
        weight, block = None, 0
        if isinstance(selection, Lists):
            lists = plans.row_lists(rows, kv, selection)
            choice, weight, block = (lists.index, lists.count, lists.number), lists.log_weight, selection.block
        else:
            assert isinstance(selection, Spans)
            choice = plans.limits_of(rows, kv, selection)
        form = Form(float(scale), softcap, selection.per == "query", block, rows.runs)
        seen = slots_seen(rows, kv).int()
        return cls(forward, form, weight, (rows.q, kv.k, kv.v, rows.seq, rows.pos, seen, *choice))


def attend(
    forward: Callable[[], Partial], rows: Rows, kv: KVView, selection: Selection, scale: float, softcap: float | None,
    sink_logit: Tensor | None,
) -> Partial:  # fmt: skip
    """attend with a backward. forward: attend without a sink, which is merged afterwards."""
    given = Given.of(forward, rows, kv, selection, scale, softcap)
    result = Partial(*_Attend.apply(given.forward, given.form, given.learnt, *given.tensors))
    if sink_logit is None:
        return result
    sink = sink_logit.to(result.lse.dtype).expand_as(result.lse)
    return merge(result, Partial(torch.zeros_like(result.out), sink))


def compute(
    forward: Callable[[], Partial], form: Form, weight: Tensor | None, q: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """out and lse of what `Given` holds."""
    if pairs.takes(form.block, weight is not None) and q.shape[0]:
        with torch.cuda.device_of(q):
            return pairs.Pairs(Problem(form, q, *others[:5]), _lists(weight, *others[5:])).forward()
    result = forward()
    return result.out, result.lse


def gradients(
    form: Form, weight: Tensor | None, tensors: Sequence[Tensor], results: Results, needs: Sequence[bool], learnt: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the log-weights, q, k and v. needs: which of q, k and v need one; rows are not none."""
    dq = dk = dv = dw = None
    needs_q, needs_k, needs_v = needs
    problem, choice = Problem(form, *tensors[:6]), tensors[6:]
    if pairs.takes(form.block, weight is not None):
        dq, dk, dv = pairs.Pairs(problem, _lists(weight, *choice)).backward(results)
    elif form.block:
        lists = _lists(weight, *choice)
        if needs_q or learnt:
            dq, dw = problem.lists_rows(results, lists, learnt)
        if needs_k or needs_v:
            dk, dv = problem.lists_keys(results, lists)
    else:
        limits = plans.Limits(*choice)
        if needs_q:
            dq = problem.spans_rows(results, limits)
        if needs_k or needs_v:
            dk, dv = problem.spans_keys(results, limits)
    return dw, dq, dk, dv


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[[], Partial], form: Form, weight: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = compute(forward, form, weight, *tensors)
        ctx.form = form
        ctx.save_for_backward(out, lse, weight, *tensors)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, weight, *tensors = ctx.saved_tensors
        form: Form = ctx.form
        _, _, learnt, *needs = ctx.needs_input_grad
        rest = [None] * (len(tensors) - 3)
        if not tensors[0].shape[0]:
            dw = None if weight is None else torch.zeros_like(weight)
            return None, None, dw, *(torch.zeros_like(x) for x in tensors[:3]), *rest
        with torch.cuda.device_of(tensors[0]):
            results = Problem(form, *tensors[:6]).results(out, lse, dout, dlse)
            found = gradients(form, weight, tensors, results, needs[:3], learnt)
        return None, None, *found, *rest


def _lists(weight: Tensor | None, index: Tensor, count: Tensor, number: Tensor) -> plans.RowLists:
    return plans.RowLists(index, count, weight, number)
