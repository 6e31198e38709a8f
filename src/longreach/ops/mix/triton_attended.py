"""attend_mixed on the GPU, with a backward. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longreach.ops.attend import prepare
from longreach.ops.attend import triton_backward as backward
from longreach.ops.mix import triton_kernels as kernels
from longreach.ops.mix.api import KeySet, check_weights
from longreach.ops.mix.triton import counts, launch, refuse
from longreach.ops.types import Partial


class _Set(NamedTuple):
    """forward, form: as `backward.Given` has them; tensors: how many are its own."""

    forward: Callable[[], Partial]
    form: backward.Form
    tensors: int


def attend_mixed(sets: Sequence[KeySet], weights: Tensor, scale: float) -> Partial:
    """sets: Spans, and Lists without log-weights."""
    q = sets[0].rows.q
    refuse(q)
    each = check_weights(weights, q.shape[:2], len(sets), q.device)
    described, tensors = [], list[Tensor]()
    for rows, kv, selection in sets:
        backward.refuse(rows, kv, selection)
        with torch.no_grad():
            plain = prepare(rows, kv, selection, scale=scale, impl="triton")
        given = backward.Given.of(plain, rows, kv, selection, scale, None)
        described.append(_Set(given.forward, given.form, len(given.tensors)))
        tensors += given.tensors
    return Partial(*_Mixed.apply(tuple(described), each, *tensors))


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sets: tuple[_Set, ...], weights: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        q = tensors[0]
        found = [backward.compute(s.forward, s.form, None, *own) for s, own in zip(sets, _split(sets, tensors))]
        outs, lses = (tuple(x.contiguous() for x in parts) for parts in zip(*found))
        out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        kept = tuple(torch.empty_like(x, dtype=q.dtype) for x in outs)
        if lse.numel():
            with torch.cuda.device_of(out):
                given, grid, options = launch(weights, (*outs, *lses))
                kernels.mixed[grid](*given, out, lse, kept, *counts(lse), KEEP=True, **options)
        ctx.sets = sets
        ctx.save_for_backward(weights, out, *kept, *lses, *tensors)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        sets: tuple[_Set, ...] = ctx.sets
        weights, out, *rest = ctx.saved_tensors
        kept, lses, tensors = rest[: len(sets)], rest[len(sets) : 2 * len(sets)], rest[2 * len(sets) :]
        q = tensors[0]
        d_weights = torch.zeros(weights.shape, dtype=torch.float32, device=out.device)
        needs = ctx.needs_input_grad[2:]
        gradients = list[Tensor | None]()
        if not q.shape[0]:
            gradients = [torch.zeros_like(x) if need else None for x, need in zip(tensors, needs)]
            return None, d_weights.to(weights.dtype), *gradients
        delta, rounded = torch.empty_like(lses[0]), torch.empty_like(out, dtype=q.dtype)
        theirs = tuple(torch.empty_like(x) for x in lses)
        with torch.cuda.device_of(out):
            given, grid, options = launch(weights, (*kept, *lses))
            kernels.given_to_sets[grid](
                *given, out, dout.contiguous(), dlse.contiguous(), delta, rounded, theirs, d_weights, *counts(dlse),
                **options,
            )  # fmt: skip
            for s, lse, own, need in zip(sets, theirs, _split(sets, tensors), _split(sets, needs)):
                results = backward.Results(lse, delta, rounded)
                _, *found = backward.gradients(s.form, None, own, results, need[:3], False)
                gradients += [x if wanted else None for x, wanted in zip(found, need[:3])]
                gradients += [None] * (s.tensors - 3)
        return None, d_weights.to(weights.dtype), *gradients


def _split(sets: tuple[_Set, ...], tensors: Sequence[Any]) -> list[Sequence[Any]]:
    """The tensors of each set."""
    found, at = list[Sequence[Any]](), 0
    for s in sets:
        found.append(tensors[at : at + s.tensors])
        at += s.tensors
    return found
