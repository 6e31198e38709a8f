"""The front doors of nearest and match."""

from __future__ import annotations

from torch import Tensor

from longreach.ops.doors import Op, Read
from longreach.ops.impl import Implementations
from longreach.ops.match.ring import Ring
from longreach.ops.match.rule import Matched, Nearest, Rule
from longreach.ops.rope import RotaryAngles
from longreach.ops.types import INTS, Rows, describe, require


def _named(op: str) -> Implementations:
    return Implementations(op, {n: f"longreach.ops.match.{n}:{op}" for n in ("reference", "triton", "numba")})


IMPLEMENTATIONS = _named("match")
_nearest = _named("nearest")


def nearest(
    query: Tensor,
    slot: Tensor,
    pos: Tensor,
    ring: Ring,
    *,
    window: int,
    oldest: int = 0,
    near: int = 1,
    far: int = 1 << 30,
    deepest: int | None = None,
    impl: str = "auto",
) -> Nearest:
    """The row of the ring whose query is nearest to each query by squared L2, head by head; ties go to the newest.

    Looked through are the rows at positions [pos - window, pos), at `oldest` and after, that the ring holds (by their
    stamps), with gaps from `near` to `far` and a depth below `deepest`. A query or a row with NaN matches nothing, and
    disturbs no other. Sums are fp32 and in a fixed order, so results are the same at every call. Distances that
    rounding explains are 0, and so ties: squared ones up to `tie(dtype)` |query|^2.

    query: [R, H, D] of the ring's dtype, as queries in the ring are (before rotation, with the same scale); slot, pos:
    int [R], the ring's sequence and the position of each; window: at most C.
    Raises InvalidInput for what does not fit, UnknownName for an unknown impl.
    """
    _check_ring(ring, window)
    ok = isinstance(query, Tensor) and query.dim() == 3 and query.dtype == ring.query.dtype
    ok = ok and query.shape[1:] == ring.query.shape[1::2] and query.device == ring.query.device
    expected = f"[R, {ring.heads}, {ring.query.shape[3]}]"
    require(ok, lambda: f"query: expected {expected} like the ring's {describe(ring.query)}, got {describe(query)}")
    for name, x in (("slot", slot), ("pos", pos)):
        ok = isinstance(x, Tensor) and x.dtype in INTS and x.shape == query.shape[:1] and x.device == query.device
        require(ok, lambda: f"{name}: expected int [R={query.shape[0]}] on {query.device}, got {describe(x)}")
    _check_slots("slot", slot, ring)
    compute = _nearest.get(impl, query.device, query)
    return compute(query, slot, pos, ring, window=window, oldest=oldest, near=near, far=far, deepest=deepest)


def match(
    rows: Rows,
    slots: Tensor,
    ring: Ring,
    rule: Rule,
    *,
    rotary: RotaryAngles | None = None,
    weight: Tensor | None = None,
    impl: str = "auto",
) -> Matched:
    """MAC-Attention's match (section 3.2) with all that is decided by it, and the rows' own place in the ring.

    For each row and head the nearest earlier query, before rotation, of those that are near enough (`Rule.limit`), ties
    as in `nearest`; one in all query heads of a KV head means that their entries are reused. Queries, stamps, depths
    and the guard's accounts of the rows are written into the ring, at pos % C, whose former content no row looks at any
    more (C is larger than the window). Nothing is decided on the host. Each sequence has one row at most.

    rows: q [R, H, D] as attend takes them; rotary: how they were rotated, None for not at all; weight: float [H, D] or
    None, what queries are multiplied by for the match; slots: int [B], the ring's sequence of each of the rows'.
    Raises InvalidInput for what does not fit, UnknownName for an unknown impl.
    """
    require(isinstance(rows, Rows), lambda: f"rows: expected Rows, got {describe(rows)}")
    require(isinstance(rule, Rule), lambda: f"rule: expected a Rule, got {describe(rule)}")
    _check_ring(ring, rule.window)
    require(
        rule.window < ring.size, lambda: f"window: expected less than the ring's {ring.size} rows, got {rule.window}"
    )
    count, heads, dim = rows.q.shape
    fits = (heads, dim) == (ring.heads, ring.query.shape[3]) and rows.q.dtype == ring.query.dtype
    fits = fits and rows.q.device == ring.query.device
    require(fits, lambda: f"rows: expected queries like the ring's {describe(ring.query)}, got {describe(rows.q)}")
    ok = isinstance(slots, Tensor) and slots.dtype in INTS and slots.dim() == 1 and slots.device == rows.q.device
    require(ok, lambda: f"slots: expected int [B] on {rows.q.device}, got {describe(slots)}")
    _check_slots("slots", slots, ring)
    if rotary is not None:
        for name, x in (("cos", rotary.cos), ("sin", rotary.sin)):
            ok = x.shape == (count, rotary.cos.shape[-1]) and x.device == rows.q.device
            require(ok, lambda: f"rotary.{name}: expected [R={count}, pairs] on {rows.q.device}, got {describe(x)}")
    if weight is not None:
        ok = isinstance(weight, Tensor) and weight.shape == (heads, dim) and weight.is_floating_point()
        ok = ok and weight.device == rows.q.device
        require(ok, lambda: f"weight: expected float [H={heads}, D={dim}] on {rows.q.device}, got {describe(weight)}")
    if rows.seq.device.type == "cpu":
        require(rows.seq.unique().numel() == count, "rows: expected one of each sequence at most, got several of one")
    return IMPLEMENTATIONS.get(impl, rows.q.device, rows, weight)(rows, slots, ring, rule, rotary, weight)


def _check_ring(ring: Ring, window: int) -> None:
    require(isinstance(ring, Ring), lambda: f"ring: expected a Ring, got {describe(ring)}")
    ok = isinstance(window, int) and 1 <= window <= ring.size
    require(ok, lambda: f"window: expected 1 to {ring.size}, the rows that the ring holds, got {window!r}")


def _check_slots(name: str, slots: Tensor, ring: Ring) -> None:
    if slots.device.type == "cpu" and slots.numel():
        low, high, most = int(slots.min()), int(slots.max()), ring.query.shape[0]
        require(low >= 0 and high < most, lambda: f"{name}: expected in [0, {most}), got {low} to {high}")


def _reads(rows: Rows, kv: object, found: Matched, *args: object, **given: object) -> tuple[Read, ...]:
    return (Read(other=found.reads[..., 1]),)


def _match(
    rows: Rows, slots: Tensor, ring: Ring, rule: Rule, *, rotary: RotaryAngles, impl: str, weight: Tensor | None = None
) -> Matched:
    return match(rows, slots, ring, rule, rotary=rotary, weight=weight, impl=impl)


MATCH = Op(_match, IMPLEMENTATIONS, ("rows", "slots", "rotary"), _reads)
