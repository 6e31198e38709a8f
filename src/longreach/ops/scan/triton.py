"""scan on the GPU, forward and backward. Nothing waits for the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from longreach.errors import Unsupported
from longreach.ops.carry import ScanCarry
from longreach.ops.scan import triton_kernels as kernels

INTERPRETED: bool = kernels.INTERPRETED.value
PROGRAMS = 1024  # of a kernel, by which chunks get their length: eight on each multiprocessor of an H200
CHUNKS = (16, 32) if INTERPRETED else (64, 2048)  # rows of a chunk, at least and at most; powers of two
PIECE = 16  # rows of one product, at most; a product needs as many
BLOCK = 256  # bytes of a row that a program takes, at most
REGISTERS = 128  # of a thread: eight programs of two warps fit on a multiprocessor
FEW = 32  # rows without gradients that one kernel computes, each sequence's one after another
CHAINED = 2 if INTERPRETED else 16  # chunks whose effects are read at once


class Runs(NamedTuple):
    """The rows as `kernels.runs` describes them, int32 [R] each."""

    source: Tensor
    last: Tensor
    first: Tensor
    stop: Tensor


def scan(x: Tensor, decay: Tensor | None, seq: Tensor, pos: Tensor, carry: ScanCarry) -> tuple[Tensor, ScanCarry]:
    refuse(x)
    given = (x, carry.mean, carry.weight) if decay is None else (x, carry.mean, carry.weight, decay)
    if x.shape[0] <= FEW and not (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
        return _few(x, decay, seq.contiguous(), pos.contiguous(), carry)
    rate = torch.ones(x.shape[1], device=x.device) if decay is None else decay
    y, mean, weight = _Scan.apply(x, rate, carry.mean, carry.weight, seq.contiguous(), pos.contiguous())
    return y, ScanCarry(mean, weight)


def refuse(x: Tensor) -> None:
    """Raise Unsupported for what the kernels cannot do and the reference can."""
    if x.dtype == torch.float64:
        raise Unsupported("scan's Triton kernels compute in fp32; for fp64 use impl='reference'")
    if x.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"scan's Triton kernels run on CUDA devices, got {x.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )
    if INTERPRETED and x.dtype == torch.bfloat16:
        raise Unsupported("scan under TRITON_INTERPRET=1: the interpreter gets bf16 wrong; use fp16, or fp32")


def _few(x: Tensor, decay: Tensor | None, seq: Tensor, pos: Tensor, carry: ScanCarry) -> tuple[Tensor, ScanCarry]:
    x = x if x.stride(2) == 1 else x.contiguous()
    rows, heads, dim = x.shape
    before = carry.mean.contiguous(), carry.weight.contiguous()
    sequences = len(before[0])
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    ended = torch.empty_like(before[0]), torch.empty_like(before[1])
    if max(rows, sequences):
        rate = carry.weight if decay is None else decay.contiguous()
        with torch.cuda.device_of(x):
            kernels.few[(max(rows, sequences), triton.cdiv(dim, _channels(x)), heads)](
                x, *x.stride()[:2], rate, seq, pos, before, y, ended, rows, sequences, heads,
                FORGETS=decay is not None, D=dim, BD=_channels(x), R2=triton.next_power_of_2(max(rows, 1)), num_warps=1,
            )  # fmt: skip
    return y, ScanCarry(*ended)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rate: Tensor, mean: Tensor, weight: Tensor, seq: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x if x.stride(2) == 1 else x.contiguous()
        carry = mean.contiguous(), weight.contiguous()
        rows, heads, _ = x.shape
        chunk = _chunk(x)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        weights = [x.new_empty(heads, rows, dtype=torch.float32) for _ in range(2)]  # W and its derivative in the decay
        table = x.new_empty(heads, 4, chunk + 1, dtype=torch.float32)
        runs = Runs(*(seq.new_empty(rows, dtype=torch.int32) for _ in range(4)))
        ended = carry[0].clone(), carry[1].clone()
        learnt = ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
        pieces = x.new_empty(triton.cdiv(rows, PIECE) if learnt else 0, *x.shape[1:], dtype=torch.float32)
        if rows:
            with torch.cuda.device_of(x):
                kernels.powers[(heads,)](rate.contiguous(), table, C=chunk, num_warps=8)
                kernels.runs[(triton.cdiv(rows, chunk),)](seq, pos, *runs, rows, mean.shape[0], C=chunk)
                _forward(x, table, runs, carry, y, weights, pieces, ended)
        ctx.save_for_backward(x, rate, *carry, pieces, *weights, table, *runs)
        ctx.set_materialize_grads(False)
        return y, *ended

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, d_mean: Tensor | None, d_weight: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, rate, mean, weight, pieces, w, v, table, *described = ctx.saved_tensors
        runs, needs = Runs(*described), ctx.needs_input_grad
        learnt = needs[1] or needs[3]
        if dy is None:  # y was not used
            dy = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        dy = dy.contiguous()
        dx, d_carry, d_start = torch.empty_like(dy), torch.zeros_like(mean), torch.zeros_like(weight)
        parts = w.new_zeros(triton.cdiv(x.shape[2], _channels(x)), *w.shape)  # of the gradient of each row's W
        if x.shape[0]:
            with torch.cuda.device_of(x):
                _backward(dy, d_mean, x, pieces, w, table, runs, (mean, weight), learnt, (dx, d_carry, parts))
        dw = parts[0] if parts.shape[0] == 1 else parts.sum(0)
        sequences = mean.shape[0]
        if d_mean is not None or d_weight is not None:
            seq, ending = runs.last.long(), runs.last >= 0
            still = torch.ones(sequences + 1, dtype=torch.bool, device=x.device)  # sequences without rows
            still = still.index_fill(0, torch.where(ending, seq, sequences), False)[:-1]
            if d_mean is not None:
                d_carry = d_carry + torch.where(still[:, None, None], d_mean, 0.0)
            if d_weight is not None and sequences:
                dw = dw + torch.where(ending, d_weight.T[:, seq.clamp(min=0)], 0.0)
                d_start = torch.where(still[:, None], d_weight, 0.0)
        if needs[3] and sequences and x.shape[0]:
            d_start = d_start + _of_carried(dw, rate, runs.source, sequences)
        d_rate = (dw * v).sum(1).to(rate.dtype) if needs[1] else None
        return dx, d_rate, d_carry, d_start, None, None


def _of_carried(dw: Tensor, rate: Tensor, source: Tensor, sequences: int) -> Tensor:
    """[B, G]: the gradient of the carry's weight, which reaches the n-th row after it by decay^n."""
    row = torch.arange(source.shape[0], device=source.device)
    start = torch.where(source == kernels.GOES_ON.value, 0, row).cummax(0).values
    seq = source[start].long()
    part = dw.T * rate.float() ** (row - start + 1)[:, None]
    part = torch.where(seq[:, None] >= 0, part, 0.0)
    # on a GPU accumulation sorts its indices: the same bits each time
    return dw.new_zeros(sequences, dw.shape[0]).index_put_((seq.clamp(min=0),), part, accumulate=True)


def _forward(
    x: Tensor, table: Tensor, runs: Runs, carry: tuple[Tensor, Tensor], y: Tensor, weights: list[Tensor],
    pieces: Tensor, ended: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Fill y, weights (W and its derivative), the state before pieces, if there is room, and after the last rows."""
    rows, heads, _ = x.shape
    form, chunks, blocks = _form(x)
    begins = carry  # not read by a single chunk
    given = x, *x.stride()[:2], table, runs.source
    if chunks > 1:
        effects, begins = _states(chunks, x), _states(chunks, x)
        kernels.ends[(heads, blocks, chunks - 1)](*given, runs.first, carry, effects, heads, _chunk(x), **form)
        _chain(effects, begins, back=False)
    kernels.means[(heads, blocks, chunks if chunks > 1 else rows)](
        *given, *runs[1:], carry, begins, y, tuple(weights), pieces, ended, rows, heads, _chunk(x), BEGUN=chunks > 1,
        KEEP=pieces.numel() > 0, **form,
    )  # fmt: skip


def _backward(
    dy: Tensor, d_mean: Tensor | None, x: Tensor, pieces: Tensor, w: Tensor, table: Tensor, runs: Runs,
    carry: tuple[Tensor, Tensor], learnt: bool, found: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Fill the gradients of x, of the carry's mean and (if `learnt`) of each row's W."""
    rows, heads, _ = x.shape
    form, chunks, blocks = _form(x)
    ended = dy if d_mean is None else d_mean.contiguous()
    begins = carry
    if chunks > 1:
        effects, begins = _states(chunks, x), _states(chunks, x)
        kernels.ends_back[(heads, blocks, chunks - 1)](
            dy, ended, w, table, runs.last, runs.stop, effects, rows, heads, _chunk(x), ENDED=d_mean is not None, **form
        )
        _chain(effects, begins, back=True)
    kernels.gradients[(heads, blocks, chunks if chunks > 1 else rows)](
        dy, ended, x, *x.stride()[:2], pieces, w, table, *runs, carry, begins, *found, rows, heads, _chunk(x),
        BEGUN=chunks > 1, ENDED=d_mean is not None, LEARNT=learnt, **(form | {"num_warps": 4}),  # with two it spills
    )  # fmt: skip


def _channels(x: Tensor) -> int:
    """Channels of a program, a power of two."""
    return min(BLOCK // x.element_size(), max(16, triton.next_power_of_2(x.shape[2])))


def _chunk(x: Tensor) -> int:
    """Rows of a chunk, a power of two: longer for more rows, so that the number of programs stays the same."""
    rows, heads, dim = x.shape
    wanted = triton.next_power_of_2(triton.cdiv(rows * heads * triton.cdiv(dim, _channels(x)), PROGRAMS))
    return min(max(wanted, CHUNKS[0]), CHUNKS[1])


def _form(x: Tensor) -> tuple[dict[str, int], int, int]:
    """Constants of kernels on x, and how many chunks and blocks of channels there are."""
    rows, _, dim = x.shape
    form = {"D": dim, "BD": _channels(x), "T": PIECE, "num_warps": 2, "maxnreg": REGISTERS}
    return form, triton.cdiv(rows, _chunk(x)), triton.cdiv(dim, _channels(x))


def _states(chunks: int, x: Tensor) -> tuple[Tensor, Tensor]:
    heads, dim = x.shape[1:]
    return torch.empty(chunks, heads, dim, device=x.device), torch.empty(chunks, heads, 4, device=x.device)


def _chain(effects: tuple[Tensor, Tensor], begins: tuple[Tensor, Tensor], *, back: bool) -> None:
    chunks, heads, dim = effects[0].shape
    kernels.chain[(heads, triton.cdiv(dim, 64))](
        effects, begins, chunks, heads, BACK=back, D=dim, BD=64, U=CHAINED, num_warps=1
    )
