"""attend_amend: attention continued from earlier results, which it brings up to date in the same pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longreach.ops.checks import check_logits, check_memory
from longreach.ops.doors import Op, Read
from longreach.ops.impl import Implementations
from longreach.ops.selection import Bound, Selection, check_bound
from longreach.ops.types import KVView, Partial, Rows, accumulator, describe, require

AMEND_IMPLEMENTATIONS = Implementations(
    "attend_amend",
    {
        "reference": "longreach.ops.attend.amend_reference:attend_amend",
        "triton": "longreach.ops.attend.triton_amend:attend_amend",
        "numba": "longreach.ops.attend.numba:attend_amend",
    },
    few_rows=True,
)


class Entries(NamedTuple):
    """Results kept in memory. out: fp32 (fp64 for fp64) [M, D], lse: like it [M], both contiguous: one entry each."""

    out: Tensor
    lse: Tensor


def attend_amend(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    split: Bound,
    entries: Entries,
    read_entry: Tensor,
    write_entry: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Partial, Tensor]:
    """attend over the selected keys and those of an entry; the part before `split`, merged with it, is a new entry.

    The complete and amend steps of MAC-Attention (sections 3.3 and 3.4) in one pass over the keys, where the paper
    subtracts: entry' = entry[take] + attention over the selected keys before the split; result = entry' + attention
    over those from it on (+ sink). Sums of Partials over disjoint keys, so nothing is lost to rounding however long
    the chain of entries. The entry belongs to keys that are not selected; NaN in one stays with who takes it.

    read_entry: int32 [R, H], the entry each row and head goes on from, -1 for none; write_entry: int32 [R, H], where
    the new one is written, -1 for nowhere. What one row takes no other row puts in the same call.
    Returns (the result, lse of the new entry [R, H]); the rest is as in `attend` and `attend_split`.
    """
    check_memory(rows, kv)
    require(isinstance(selection, Selection), lambda: f"selection: expected a Selection, got {describe(selection)}")
    selection.check(rows, kv)
    check_bound("split", split, selection.per, rows, kv)
    check_logits(scale, softcap, rows, sink_logit)
    count, heads, dim = rows.q.shape
    dtype, device = accumulator(rows.q.dtype), rows.q.device
    for name, x, shape in (
        ("out", entries.out, (entries.lse.numel(), dim)),
        ("lse", entries.lse, entries.lse.shape[:1]),
    ):
        ok = isinstance(x, Tensor) and x.shape == shape and x.dtype == dtype and x.device == device
        require(ok and x.is_contiguous(), lambda: f"entries.{name}: expected {dtype} {list(shape)}, got {describe(x)}")
    for name, x in (("read_entry", read_entry), ("write_entry", write_entry)):
        ok = isinstance(x, Tensor) and x.dtype == torch.int32 and x.shape == (count, heads) and x.device == device
        require(
            ok and x.is_contiguous(), lambda: f"{name}: expected int32 {[count, heads]} on {device}, got {describe(x)}"
        )
        if device.type == "cpu" and x.numel():
            low, high, most = int(x.min()), int(x.max()), entries.lse.numel()
            require(low >= -1 and high < most, lambda: f"{name}: expected in [-1, {most}), got {low} to {high}")
    weight = getattr(selection, "log_weight", None)
    compute = AMEND_IMPLEMENTATIONS.get(impl, device, rows, kv, weight, entries, sink_logit)
    return compute(
        rows, kv, selection, split, entries, read_entry, write_entry, scale=scale, softcap=softcap,
        sink_logit=sink_logit
    )  # fmt: skip


def _reads(rows: Rows, kv: KVView, result: object, selection: Selection, *args: object) -> tuple[Read, ...]:
    return (Read.of(kv, selection),)


AMEND = Op(attend_amend, AMEND_IMPLEMENTATIONS, ("rows", "kv", "scale", "softcap", "sink_logit"), _reads)
