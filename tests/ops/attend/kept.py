"""Kept logits against the fp64 oracle, whoever keeps them; the bound that fp16 beside a block's largest gets on top.

fp16 rounds x = logit - top by at most 2^-11 |x|, so the relative error of exp(logit) by that: e = 2^-11 (largest logit
of the row - logit) at most. Over weights p of a selection, with E = sum p e: lse changes by E, out by
sum p e |v| + E sum p |v|; both to first order, so a tenth on top (e stays below 0.1 for all that weighs anything).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longreach.ops import (
    KVView,
    Logits,
    Partial,
    Rows,
    Selection,
    Spans,
    attend_from_logits,
    attend_with_logits,
    score_keys,
)
from longreach.testing.oracle import Exact, exact_attend, exact_logits, seen_keys
from longreach.testing.tolerance import bounds, logits_bound, unit_roundoff, within
from tests.ops.attend.kernels import HARDWARE, here, here_all

HALF_STEP = unit_roundoff(torch.float16)


def unit(impl: str, dtype: torch.dtype) -> float:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return unit_roundoff(wide) * (1.0 if impl == "reference" else HARDWARE)


def gaps(x: Tensor) -> Tensor:
    """How far each seen logit of exact_logits lies below its row's largest; 0 where not seen."""
    top = x.amax(2, keepdim=True)
    return (top - x).nan_to_num(nan=0.0, posinf=0.0)


def check_kept(rows: Rows, kv: KVView, *, impl: str, values: bool, **logits: Any) -> Logits:
    """What is kept, and the dense result, after comparing both with the oracle's."""
    logits = {"scale": rows.q.shape[2] ** -0.5, **logits}
    op = attend_with_logits if values else score_keys
    made, kept = op(here(rows), here(kv), **here_all(logits), impl=impl)
    want = exact_attend(rows, kv, Spans.dense(), **logits)
    half = rows.q.dtype in (torch.float16, torch.bfloat16)
    if isinstance(made, Partial):
        rounded = unit_roundoff(rows.q.dtype) if half and impl == "triton" else 0.0
        compare(made, want, bounds(want, unit(impl, rows.q.dtype), rounded))
    else:
        lse = made.double().cpu()
        assert torch.equal(lse == -torch.inf, want.lse == -torch.inf)
        some = lse > -torch.inf
        within("lse", lse[some], want.lse[some], bounds(want, unit(impl, rows.q.dtype))[1][some])
    shape = {k: v for k, v in logits.items() if k != "sink_logit"}
    exact = exact_logits(rows, kv, **shape)
    seen = exact > -torch.inf
    bare = exact_attend(rows, kv, Spans.dense(), **shape)
    bound = logits_bound(bare, unit(impl, rows.q.dtype)).unflatten(1, (kv.heads, -1))[:, :, None].expand_as(exact)
    if kept.top is not None:
        bound = (
            bound + HALF_STEP * gaps(exact) + unit(impl, rows.q.dtype) * max(bare.logit.flatten().tolist(), default=0.0)
        )
    within("logits", kept.natural(kv.capacity).double().cpu()[seen], exact[seen], bound[seen])
    return kept


def compare(got: Partial, want: Exact, bound: tuple[Tensor, Tensor]) -> None:
    empty = want.lse == -torch.inf
    out, lse = got.out.double().cpu(), got.lse.double().cpu()
    assert torch.equal(lse == -torch.inf, empty) and not bool(out[empty].any())
    within("lse", lse[~empty], want.lse[~empty], bound[1][~empty])
    within("out", out, want.out, bound[0])


def check_values(rows: Rows, kv: KVView, selection: Selection, *, impl: str, **logits: Any) -> Partial:
    """attend_from_logits' result over what score_keys kept, after comparing it with the oracle's attend."""
    logits = {"scale": rows.q.shape[2] ** -0.5, **logits}
    sink = logits.pop("sink_logit", None)
    _, kept = score_keys(here(rows), here(kv), **logits, impl=impl)
    got = attend_from_logits(here(rows), here(kv), here(selection), kept, sink_logit=here(sink), impl=impl)
    want = exact_attend(rows, kv, selection, **logits, sink_logit=sink)
    half = rows.q.dtype in (torch.float16, torch.bfloat16)
    rounded = unit_roundoff(rows.q.dtype) if half and impl == "triton" else 0.0
    out, lse = bounds(want, unit(impl, rows.q.dtype), rounded)
    if kept.top is not None:
        more_out, more_lse = rounding(rows, kv, selection, exact_logits(rows, kv, **logits))
        out, lse = out + more_out, lse + more_lse
    compare(got, want, (out, lse))
    return got


def rounding(rows: Rows, kv: KVView, selection: Selection, exact: Tensor) -> tuple[Tensor, Tensor]:
    """What rounding of kept logits may change of out [R, H, D] and lse [R, H]."""
    gap = (HALF_STEP * gaps(exact)).transpose(2, 3).flatten(1, 2)  # [R, H, N]
    x = exact.transpose(2, 3).flatten(1, 2)
    out, lse = torch.zeros(rows.q.shape, dtype=torch.float64), torch.zeros(rows.q.shape[:2], dtype=torch.float64)
    for r, row in enumerate(seen_keys(rows, kv, selection)):
        for h, keys in enumerate(row):
            slots = torch.tensor(list(keys), dtype=torch.int64)
            weight = torch.tensor(list(keys.values()), dtype=torch.float64)
            p = torch.softmax(x[r, h, slots] + weight, 0).nan_to_num(nan=0.0)
            page, offset = kv.locate(rows.seq[r].expand_as(slots), slots)
            v = kv.v[page, h // kv.group(rows), offset].double().abs()
            e = (p * gap[r, h, slots]).sum()
            lse[r, h] = 1.1 * e
            out[r, h] = 1.1 * ((p * gap[r, h, slots]) @ v + e * (p @ v))
    return out, lse
