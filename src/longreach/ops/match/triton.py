"""nearest and match on the GPU: launches that do not depend on what is in memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.match import triton_kernels as kernels
from longreach.ops.match.ring import Ring
from longreach.ops.match.rule import NOTES, Matched, Nearest, Rule, tie
from longreach.ops.match.triton_tuning import INTERPRETED, Tuning, tuning
from longreach.ops.rope import RotaryAngles
from longreach.ops.types import Rows


def match(
    rows: Rows,
    slots: Tensor,
    ring: Ring,
    rule: Rule,
    rotary: RotaryAngles | None,
    weight: Tensor | None,
    *,
    tune: Tuning | None = None,
) -> Matched:
    refuse(ring)
    count, heads = rows.q.shape[:2]
    start, take, put = (torch.empty(count, heads, dtype=torch.int32, device=rows.q.device) for _ in range(3))
    reads = torch.empty(count, ring.kv_heads, 2, dtype=torch.int32, device=rows.q.device)
    notes = torch.empty(count, heads, len(NOTES), dtype=torch.float32, device=rows.q.device)
    result = Matched(start, take, put, reads, notes)
    q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
    given = (q, *q.stride()[:2], rows.seq.contiguous(), rows.pos.contiguous())
    _launch(given, slots.contiguous(), ring, rule, rotary, weight, tuple(result), tune)
    return result


def nearest(
    query: Tensor, slot: Tensor, pos: Tensor, ring: Ring, *, window: int, oldest: int, near: int, far: int,
    deepest: int | None, tune: Tuning | None = None,
) -> Nearest:  # fmt: skip
    refuse(ring)
    shape = query.shape[:2]
    result = Nearest(query.new_empty(shape, dtype=torch.float32), slot.new_empty(shape, dtype=torch.int32))
    rule = Rule(window, 1, 0.0, deepest=deepest, near=near, far=far)
    given = (query.contiguous(), *query.contiguous().stride()[:2], slot.contiguous(), pos.contiguous())
    _launch(given, None, ring, rule, None, None, tuple(result), tune, oldest=max(oldest, 0))
    return result


def refuse(ring: Ring) -> None:
    """Raise Unsupported for what these kernels cannot do and the reference can."""
    if ring.query.dtype == torch.float64:
        raise Unsupported("the Triton kernels of nearest compute in fp32; for fp64 use impl='reference'")
    if ring.query.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"the Triton kernels of nearest run on CUDA devices, got {ring.query.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )
    if ring.query[..., 0].numel() >= 1 << 31:
        raise Unsupported(f"the Triton kernels of nearest address 2^31 ring rows, got {list(ring.query.shape[:3])}")


def _launch(
    rows: tuple[Any, ...],
    slots: Tensor | None,
    ring: Ring,
    rule: Rule,
    turn: RotaryAngles | None,
    weight: Tensor | None,
    result: tuple[Tensor, ...],
    tune: Tuning | None,
    *,
    oldest: int | None = None,
) -> None:
    """slots: None for `nearest`, whose rows name sequences of the ring."""
    q = rows[0]
    count, heads, dim = q.shape
    if not count:
        return
    matching = slots is not None
    group = heads // ring.kv_heads
    wide = max(16, triton.next_power_of_2(dim))
    t = tune or tuning(count * heads, rule.window, wide * q.dtype.itemsize)
    ages = -(-rule.window // (t.pieces * t.block)) * t.block
    pieces = -(-rule.window // ages)
    programs = count * heads * pieces
    found = (
        torch.empty(programs, dtype=torch.int64, device=q.device),
        q.new_empty(0 if ages == t.block else programs * ages, dtype=torch.float32),
    )
    turns = (q, 0, 0, q, 0, 0) if turn is None else (turn.cos, *turn.cos.stride(), turn.sin, *turn.sin.stride())
    deepest = rule.deepest
    numbers = (
        rule.window, rule.oldest if oldest is None else oldest, rule.band, rule.sinks, rule.min_context, rule.near,
        rule.far, deepest or 0, float(rule.limit), float(rule.patience), float(rule.rest), float(rule.price),
        float(rule.reuses), tie(ring.query.dtype),
    )  # fmt: skip
    memory = (ring.query, ring.stamp, ring.depth, ring.credit, ring.arrivals)
    shape = {
        "H": heads, "G": ring.kv_heads, "C": ring.size, "D": dim, "HG": triton.next_power_of_2(group), "P": pieces,
        "PP": triton.next_power_of_2(pieces), "BOUNDED": deepest is not None, "MATCH": matching, "CHAINED": t.chained,
    }  # fmt: skip
    joined = t.joined and matching
    launch: dict[str, Any] = {"launch_pdl": True} if t.chained else {}
    named = rows[3] if slots is None else slots
    sizes = named.shape[0], ring.query.shape[0]
    with torch.cuda.device_of(q):
        kernels.search[(programs,)](
            rows, named, sizes, memory, turns, q if weight is None else weight.contiguous(), found, result, numbers,
            BD=wide, P2=0 if turn is None else 2 * turn.cos.shape[1], AGES=ages,
            AGES2=triton.next_power_of_2(ages), BK=t.block, STAGES=t.stages,
            HALVES=turn is not None and turn.layout == "half", WEIGHTED=weight is not None, JOINED=joined,
            num_warps=t.warps, **shape, **launch,
        )  # fmt: skip
        if not joined:
            kernels.decide[(count * ring.kv_heads,)](
                rows, named, sizes, memory, found, result, numbers, num_warps=1, **shape, **launch
            )
