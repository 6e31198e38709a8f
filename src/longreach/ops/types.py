"""The nouns every method is written with: Rows, KVView, Partial, HeadShard and so on (Selection has its own file).

Letters: B sequences, R rows, H query heads, G KV heads, N keys, D head dim, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longreach.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from longreach.ops.host_calls import HostCalls

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
WIDEST, MOST_GROUP = 1024, 128  # head dim, and query heads of a KV head, that the reference and Numba take
KERNEL_WIDEST, KERNEL_GROUP = 576, 128  # those that Triton's kernels of most ops take
PLAIN_WIDEST, PLAIN_GROUP = 256, 16  # those that all of them take, by the launches tuned for these


def require(condition: bool, message: str | Callable[[], str]) -> None:
    """Raise InvalidInput with `message` unless `condition` holds.

    message: text, or a function that makes it, for checks of every layer and step: most of their time goes into texts.
    """
    if not condition:
        raise InvalidInput(message if isinstance(message, str) else message())


def describe(x: object) -> str:
    """How an argument looks, for error messages: dtype, shape and device of a tensor, else its type."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}"
    return type(x).__name__


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype results are accumulated in: fp64 for fp64 inputs (gradient checks), else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RowRange(NamedTuple):
    """Consecutive rows, described on the host: `rows` of sequence `seq`, at positions first, first + 1, ...

    first is given only if slots [0, first + rows) of the sequence are filled. None: positions are on the device only;
    none is below the one before it.
    """

    rows: int
    seq: int
    first: int | None = None


@dataclass(frozen=True)
class Rows:
    """Queries, packed. A rectangle [B, T] is a view of it; rows may come in any order.

    q: [R, H, D] float; seq: [R] int, the sequence each row belongs to, in [0, B);
    pos: [R] int, its absolute position. Causal limits and windows come from `pos`, never from row order.
    runs: the same rows described on the host, run by run, or None. They must be true; implementations choose tiles and
        kernels by them. They change no result.
    """

    q: Tensor
    seq: Tensor
    pos: Tensor
    runs: tuple[RowRange, ...] | None = None

    def __post_init__(self) -> None:
        require(
            isinstance(self.q, Tensor) and self.q.dim() == 3, lambda: f"q: expected [R, H, D], got {describe(self.q)}"
        )
        require(self.q.dtype in FLOATS, lambda: f"q: expected bf16, fp16, fp32 or fp64, got {describe(self.q)}")
        rows, _, dim = self.q.shape
        fits = dim % 8 == 0 and 8 <= dim <= WIDEST
        require(fits, lambda: f"q: head dim must be a multiple of 8 up to {WIDEST}, got {dim}")
        for name, x in (("seq", self.seq), ("pos", self.pos)):
            ok = isinstance(x, Tensor) and x.dtype in INTS and x.shape == (rows,)
            require(ok, lambda: f"{name}: expected int32 or int64 [R={rows}], got {describe(x)}")
            require(x.device == self.q.device, lambda: f"{name}: expected on {self.q.device} like q, got {describe(x)}")
        if self.runs is not None:
            total = sum(run.rows for run in self.runs)
            require(total == rows, lambda: f"runs: expected rows that sum to R={rows}, got {total}")

    def take(self, index: Tensor) -> Rows:
        """The rows at `index` [r]."""
        return Rows(self.q[index], self.seq[index], self.pos[index])


@dataclass(frozen=True)
class KVView:
    """Where keys and values are. One layout serves contiguous and paged memory.

    k, v: [P, G, page, D], strided views whose last dimension is contiguous.
    seq_lens: [B] int, slots in use per sequence; slots at and above it are never read.
    block_table: [B, pages] int, slot n of sequence b lies at [block_table[b, n // page], :, n % page];
        None means sequence b is page b (contiguous: one page holds the whole sequence).
    slot_pos: [P, G, page] int, each slot's position where it differs from its index (after eviction).
    k_scale, v_scale: reserved for quantised KV; refused until implemented.
    calls: the calls by which the CPU computes attention to keys and values in host memory. For few rows of a sequence
        "auto" is then the implementation "cpu". None: the view's own device reads them.
    values_in_keys: the values are the keys themselves, in one memory (v is k), as for a latent cache (MLA). A pass that
        reads both counts the keys alone.
    """

    k: Tensor
    v: Tensor
    seq_lens: Tensor
    block_table: Tensor | None = None
    slot_pos: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    calls: HostCalls | None = None
    values_in_keys: bool = False

    def __post_init__(self) -> None:
        k, v, filled = self.k, self.v, self.seq_lens
        require(isinstance(k, Tensor) and k.dim() == 4, lambda: f"k: expected [P, G, page, D], got {describe(k)}")
        require(k.dtype in FLOATS, lambda: f"k: expected bf16, fp16, fp32 or fp64, got {describe(k)}")
        require(min(k.shape[1:]) >= 1, lambda: f"k: expected at least one KV head, slot and channel, got {describe(k)}")
        same = isinstance(v, Tensor) and v.shape == k.shape and v.dtype == k.dtype and v.device == k.device
        require(same, lambda: f"v: expected {describe(k)} like k, got {describe(v)}")
        require(k.stride(-1) == 1 and v.stride(-1) == 1, "k, v: the last dimension must be contiguous")
        ok = isinstance(filled, Tensor) and filled.dtype in INTS and filled.dim() == 1
        require(ok, lambda: f"seq_lens: expected int32 or int64 [B], got {describe(filled)}")
        table = self.block_table
        if table is None:
            same = filled.shape[0] == k.shape[0]
            require(same, lambda: f"seq_lens: without a block table expected [P={k.shape[0]}], got {describe(filled)}")
        else:
            ok = isinstance(table, Tensor) and table.dtype in INTS and table.dim() == 2
            ok = ok and table.shape[0] == filled.shape[0]
            require(ok, lambda: f"block_table: expected int [B={filled.shape[0]}, pages], got {describe(table)}")
        if self.slot_pos is not None:
            ok = isinstance(self.slot_pos, Tensor) and self.slot_pos.dtype in INTS
            ok = ok and self.slot_pos.shape == k.shape[:3]
            require(ok, lambda: f"slot_pos: expected int {list(k.shape[:3])}, got {describe(self.slot_pos)}")
        for name in ("v", "seq_lens", "block_table", "slot_pos"):
            x = getattr(self, name)
            on = x is None or x.device == k.device
            require(on, lambda: f"{name}: expected on {k.device} like k, got {describe(x)}")
        if self.k_scale is not None or self.v_scale is not None:
            raise Unsupported("k_scale, v_scale: quantised KV is not implemented yet; pass unscaled K and V")
        one = v is k or not self.values_in_keys
        require(one, "v: with values_in_keys expected the same tensor as k, got another one")

    @property
    def sequences(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def heads(self) -> int:
        return self.k.shape[1]

    @property
    def page(self) -> int:
        """Slots in one page of memory."""
        return self.k.shape[2]

    @property
    def capacity(self) -> int:
        """Slots a sequence can address."""
        return self.page * (1 if self.block_table is None else self.block_table.shape[1])

    def locate(self, seq: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Page and offset in memory of `slot` of sequence `seq` (both int, broadcast together)."""
        page = seq if self.block_table is None else self.block_table[seq, slot // self.page].long()
        return page.long().expand_as(slot), (slot % self.page).long()

    def group(self, rows: Rows) -> int:
        """Query heads per KV head; raises InvalidInput where rows and view do not fit together."""
        heads, dim = rows.q.shape[1:]
        require(dim == self.k.shape[3], lambda: f"head dim: q has {dim}, k has {self.k.shape[3]}")
        require(rows.q.dtype == self.k.dtype, lambda: f"dtype: q is {describe(rows.q)}, k is {describe(self.k)}")
        require(rows.q.device == self.k.device, lambda: f"device: q is on {rows.q.device}, k on {self.k.device}")
        fits = heads % self.heads == 0 and 1 <= heads // self.heads <= MOST_GROUP
        require(fits, lambda: f"heads: {heads} query heads must be 1 to {MOST_GROUP} times the {self.heads} KV heads")
        return heads // self.heads


@dataclass(frozen=True)
class ScoringKeys:
    """An 8-bit copy of a view's keys, to score them at half the bytes: key = k * scale (see quantise_keys).

    k: int8 [P, G, page, D], scale: fp32 [P, G, page], strided views whose last dimension is contiguous. Pages and slots
    are those of the view: its block table finds them.
    """

    k: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        k, scale = self.k, self.scale
        ok = isinstance(k, Tensor) and k.dim() == 4 and k.dtype == torch.int8
        require(ok, lambda: f"k: expected int8 [P, G, page, D], got {describe(k)}")
        ok = isinstance(scale, Tensor) and scale.dtype == torch.float32 and scale.shape == k.shape[:3]
        ok = ok and scale.device == k.device
        require(ok, lambda: f"scale: expected float32 {list(k.shape[:3])} on {k.device}, got {describe(scale)}")
        require(k.stride(-1) == 1 and scale.stride(-1) == 1, "k, scale: the last dimension must be contiguous")


@dataclass(frozen=True)
class Partial:
    """The attention result over a set of keys.

    out: [R, H, D], softmax-weighted mean of the values; lse: [R, H], natural log of the sum of exp(logit).
    Both fp32 (fp64 for fp64 inputs). Over no keys: out 0, lse -inf.
    """

    out: Tensor
    lse: Tensor

    def __post_init__(self) -> None:
        out, lse = self.out, self.lse
        require(isinstance(out, Tensor) and out.dim() == 3, lambda: f"out: expected [R, H, D], got {describe(out)}")
        wide = (torch.float32, torch.float64)
        require(out.dtype in wide, lambda: f"out: expected fp32 (or fp64), got {describe(out)}")
        ok = isinstance(lse, Tensor) and lse.shape == out.shape[:2]
        ok = ok and lse.dtype == out.dtype and lse.device == out.device
        require(ok, lambda: f"lse: expected {list(out.shape[:2])} with dtype and device of out, got {describe(lse)}")

    @classmethod
    def empty(
        cls, rows: int, heads: int, dim: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Partial:
        """The result over no keys: the identity of merge."""
        lse = torch.full((rows, heads), -torch.inf, dtype=dtype, device=device)
        return cls(torch.zeros(rows, heads, dim, dtype=dtype, device=device), lse)

    @property
    def is_empty(self) -> Tensor:
        """[R, H] bool: where the result is over no keys."""
        return self.lse == -torch.inf


@dataclass(frozen=True)
class Pieces:
    """A Partial in S pieces, over keys that have none in common: what a kernel leaves for one that merges more results.

    out: [S, R, H, D], lse: [S, R, H], as a Partial has them, but where lse is -inf out may hold anything.
    """

    out: Tensor
    lse: Tensor

    def __post_init__(self) -> None:
        out, lse = self.out, self.lse
        ok = isinstance(out, Tensor) and out.dim() == 4 and out.dtype in (torch.float32, torch.float64)
        require(ok, lambda: f"out: expected fp32 (or fp64) [S, R, H, D], got {describe(out)}")
        ok = isinstance(lse, Tensor) and lse.shape == out.shape[:3]
        ok = ok and lse.dtype == out.dtype and lse.device == out.device
        require(ok, lambda: f"lse: expected {list(out.shape[:3])} with dtype and device of out, got {describe(lse)}")

    @classmethod
    def of(cls, partial: Partial) -> Pieces:
        """A Partial in one piece."""
        return cls(partial.out[None], partial.lse[None])


@dataclass(frozen=True)
class Logits:
    """The logits of all keys a row reaches, left by one pass over the keys for later passes of the same call.

    Made by attend_with_logits and score_keys, taken by attend_from_logits and pooled_scores; methods hand it on and
    look at nothing in it. A softcap is in them; sinks and log-weights are not.

    x: [R, G, N, group], the query heads of a KV head side by side, N slots a sequence can address. Slots that a row
        does not reach hold anything: those at min(seq_lens, pos + 1) and above, after eviction at seq_lens and above.
    top: None: x are the logits, fp32 (or fp64). Else fp32 [R, G, ceil(N / block), group], the largest logit of each
        `block` slots over ln 2, and x is fp16: logit = ln 2 (top + x). Half the bytes of fp32, and a weight's relative
        error is at most 2^-11 (largest logit - logit): large only where the weight itself is small.
    """

    x: Tensor
    top: Tensor | None = None
    block: int = 1

    def __post_init__(self) -> None:
        x, top = self.x, self.top
        require(isinstance(x, Tensor) and x.dim() == 4, lambda: f"x: expected [R, G, N, group], got {describe(x)}")
        if top is None:
            require(x.dtype in (torch.float32, torch.float64), lambda: f"x: expected fp32 or fp64, got {describe(x)}")
            return
        require(x.dtype == torch.float16, lambda: f"x: expected fp16 when top is given, got {describe(x)}")
        count = isinstance(self.block, int) and self.block >= 1
        require(count, lambda: f"block: expected a count of slots >= 1, got {self.block!r}")
        shape = (*x.shape[:2], -(-x.shape[2] // self.block), x.shape[3])
        ok = isinstance(top, Tensor) and top.dtype == torch.float32 and top.shape == shape and top.device == x.device
        require(ok, lambda: f"top: expected fp32 {list(shape)} on {x.device}, got {describe(top)}")

    def take(self, index: Tensor) -> Logits:
        """The rows at `index` [r]."""
        return Logits(self.x[index], None if self.top is None else self.top[index], self.block)

    def natural(self, stop: int) -> Tensor:
        """The logits of slots below `stop`: fp32 (or fp64) [R, G, stop, group]."""
        x = self.x[:, :, :stop]
        if self.top is None:
            return x
        return (x.float() + self.top.repeat_interleave(self.block, 2)[:, :, :stop]) * math.log(2)


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class HeadShard:
    """The KV heads a tensor-parallel rank holds: global heads [first, first + count) of total.

    What is pooled over heads goes through `sum` (an all-reduce over the ranks; the identity on one rank)
    before anything is chosen from it, or ranks choose different keys.
    """

    first: int
    count: int
    total: int
    sum: Callable[[Tensor], Tensor] = _identity

    def __post_init__(self) -> None:
        ok = self.first >= 0 and self.count >= 1 and self.first + self.count <= self.total
        require(ok, lambda: f"HeadShard: [{self.first}, {self.first + self.count}) does not lie in [0, {self.total})")

    @classmethod
    def whole(cls, heads: int) -> HeadShard:
        """All heads on one rank."""
        return cls(0, heads, heads)

    def slice(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor that holds one entry per global KV head along `dim`."""
        require(
            x.shape[dim] == self.total, lambda: f"expected {self.total} global heads along dim {dim}, got {describe(x)}"
        )
        return x.narrow(dim, self.first, self.count)
