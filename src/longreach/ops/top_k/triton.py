"""top_k on the GPU: the launches of its kernels and the memory they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.top_k import triton_kernels as kernels
from longreach.ops.top_k import triton_sample as sample
from longreach.ops.top_k.triton_keys import COLUMNS
from longreach.ops.top_k.triton_short import short

INTERPRETED: bool = kernels.INTERPRETED.value


@dataclass(frozen=True)
class Tuning:
    """How the kernels are launched.

    short: rows of up to so many columns are held by one program, at most `registers` a thread (64 let two programs
    of 16 warps run at once); samples: columns of the sample of longer rows; sigmas: half the width of the bracket;
    room: a row may have one candidate in so many columns; words: words of 32 columns a program of `classify` has;
    part: those that one of `write` has, up to 512, in pieces of 8 or 16 bits, one a thread at a time;
    at_once: candidates that `resolve` holds; searched: columns that its slow path reads at a time; early: whether the
    next kernel may start while the last one runs.
    """

    part: int
    samples: int = 4096
    words: int = 128
    piece: int = 16
    bracket_warps: int = 16
    classify_warps: int = 4
    classify_registers: int | None = None
    write_warps: int = 4
    at_once: int = 8192
    searched: int = 8192
    sigmas: float = 4.0
    room: int = 8
    short: int = 8192
    registers: int = 64
    early: bool = False
    chained: bool = not INTERPRETED


def tuning(rows: int, columns: int) -> Tuning:
    """The launch for so many rows: few of them leave multiprocessors idle."""
    part = 256 if rows * columns >= 1 << 23 else 64
    return Tuning(part, registers=64 if rows > 128 else 128, early=rows < 32)


class Space(NamedTuple):
    """What the kernels tell each other of each row."""

    marks: Tensor  # int32 [rows, 8], see triton_kernels
    counter: Tensor  # int32 [rows], candidates
    tally: Tensor  # int32 [rows, 3, blocks], bits of a block that are sure, tied at the high end, at the low end
    planes: Tensor  # int32 [rows, 2, words], bits that are sure or tied high, bits that are tied
    found: Tensor  # int64 [rows, room], candidates: value and column
    ahead: Tensor  # int64 [rows, parts], bits before a part: chosen ones, tied ones << 32


def top_k(x: Tensor, count: Tensor, length: Tensor, *, first: int, last: int, capacity: int) -> tuple[Tensor, Tensor]:
    index, used, _ = launch(x, count, length, first=first, last=last, capacity=capacity)
    return index, used


def launch(
    x: Tensor,
    count: Tensor,
    length: Tensor,
    *,
    first: int,
    last: int,
    capacity: int,
    tune: Tuning | None = None,
) -> tuple[Tensor, Tensor, Space | None]:
    """index, used and, for rows that are not short, what the kernels told each other."""
    if x.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"top_k's Triton kernels run on CUDA devices, got {x.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )
    lists, heads, columns = x.shape
    rows = lists * heads
    index = torch.empty(lists, heads, capacity, dtype=torch.int32, device=x.device)
    used = torch.empty(lists, heads, dtype=torch.int32, device=x.device)
    if not rows:
        return index, used, None
    t = tune or tuning(rows, columns)
    length_head = length.stride(1) if length.dim() == 2 else 0
    lengths = (length, length.stride(0), length_head)
    given = (x, *x.stride()[:2], count.contiguous(), *lengths, heads, columns, first, last, capacity)
    with torch.cuda.device_of(x):
        if columns <= t.short:
            _short(given, used, index, t)
            return index, used, None
        return index, used, _long(given, used, index, t)


def _chain(t: Tuning) -> dict[str, bool]:
    return {"CHAINED": t.chained} | ({"launch_pdl": True} if t.chained else {})


def _short(given: tuple, used: Tensor, index: Tensor, t: Tuning) -> None:
    block = max(128, triton.next_power_of_2(given[COLUMNS.value]))
    short[(used.numel(),)](
        given,
        used,
        index,
        NB=block,
        EARLY=t.early,
        num_warps=max(1, block // 512),
        maxnreg=t.registers,
        **_chain(t),
    )


def _long(given: tuple, used: Tensor, index: Tensor, t: Tuning) -> Space:
    rows, columns = used.numel(), given[COLUMNS.value]
    blocks = triton.cdiv(columns, 32 * t.words)
    words = blocks * t.words
    parts = triton.cdiv(words, t.part)
    room = triton.next_power_of_2(triton.cdiv(columns, t.room))

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=used.device)

    space = Space(
        ints(rows, sample.MARKS.value),
        ints(rows),
        ints(rows, 3, blocks),
        ints(rows, 2, words),
        ints(rows, room, dtype=torch.int64),
        ints(rows, parts, dtype=torch.int64),
    )
    chain = _chain(t)
    sample.bracket[(rows,)](
        given, tuple(space), used, SAMPLES=t.samples, SIGMAS=t.sigmas, SLACK=max(1, t.samples // 256),
        num_warps=t.bracket_warps, **chain,
    )  # fmt: skip
    kernels.classify[(rows, blocks)](
        given, tuple(space), blocks, C=room, W=t.words, QUADS=columns % 4 == 0, num_warps=t.classify_warps, **chain,
        **({"maxnreg": t.classify_registers} if t.classify_registers else {}),
    )  # fmt: skip
    at_once = min(t.at_once, room)
    kernels.resolve[(rows,)](
        given, tuple(space), blocks, C=room, W=t.words, NB=at_once, SEARCH=t.searched, B=triton.next_power_of_2(blocks),
        PW=t.part, num_warps=max(1, at_once // 512), maxnreg=t.registers, **chain,
    )  # fmt: skip
    kernels.write[(rows, parts)](
        given,
        tuple(space),
        index,
        words,
        PW=t.part,
        T=32 * t.write_warps,
        BITS=t.piece,
        EARLY=t.early,
        num_warps=t.write_warps,
        **chain,
    )
    return space
