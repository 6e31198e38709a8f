"""One score a key for all heads: the front doors of largest_log_prob, spread_logits and rank_round_robin.

A round robin lets each head name its best key, then its second best, and so on (LessIsMore: Yang et al., 2025, arXiv
2508.07101). A key's turn is the least, over the heads that name it, of rank * heads + head. To choose n keys, only the
n best of each head matter, so no row is sorted:

1. `spread_logits`: logits by head, keys that are kept in any case left out, and how many keys each head may name;
2. `top_k` of them: each head's best keys, in no order;
3. `rank_round_robin`: their ranks, and from those the scores of all keys, larger for an earlier turn.

All take `logits` as attend_with_logits or score_keys left them for the same rows and view. Nothing waits for the
device, and launches depend on shapes alone. Each is one kernel on a GPU.
Raises InvalidInput for shapes, dtypes and devices that do not fit, and UnknownName for an unknown impl.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longreach.ops.checks import check_kept, check_memory
from longreach.ops.doors import Op
from longreach.ops.impl import Implementations
from longreach.ops.types import INTS, KVView, Logits, Rows, describe, require


def _named(op: str) -> Implementations:
    return Implementations(op, {n: f"longreach.ops.across_heads.{n}:{op}" for n in ("reference", "triton", "numba")})


LARGEST = _named("largest_log_prob")
SPREADING = _named("spread_logits")
RANKING = _named("rank_round_robin")
MAX_TURN = 1 << 24  # scores are negative turns: fp32 holds whole numbers up to here


class Ballot(NamedTuple):
    """Input of a round robin's `top_k`.

    logits: fp32 [R, H, N], -inf at slots that are kept in any case. depth: int32 [R, H], keys that each head may name.
    scores: fp32 [R, N], 2 for the most recent slots, 1 for other first ones, -inf for all else. What lies past the
    slots that a row reaches may be anything in logits and scores.
    """

    logits: Tensor
    depth: Tensor
    scores: Tensor


def largest_log_prob(rows: Rows, kv: KVView, lse: Tensor, logits: Logits, *, impl: str = "auto") -> Tensor:
    """The largest log-probability that any query head gives each slot: fp32 [R, N], max over h of logit - lse.

    lse: fp32 [R, H], with the sink if there is one. Past the slots that a row reaches it may be anything; the reference
    leaves NaN there.
    """
    _check(rows, kv, logits)
    heads = rows.q.shape[:2]
    ok = isinstance(lse, Tensor) and lse.shape == heads and lse.is_floating_point() and lse.device == rows.q.device
    require(ok, lambda: f"lse: expected float {list(heads)} on {rows.q.device}, got {describe(lse)}")
    found: Tensor = LARGEST.get(impl, rows.q.device, rows, kv, lse, logits)(rows, kv, lse, logits)
    return found


def spread_logits(
    rows: Rows, kv: KVView, logits: Logits, count: Tensor, recent: Tensor, *, first: int, most: int, impl: str = "auto"
) -> Ballot:
    """The ballot of a round robin for `count` keys of each row.

    count, recent: int [R], number of keys to choose in all, and of most recent ones that are always kept. first: number
    of first slots that are always kept. most: the largest count, on the host; a larger count is cut to it.
    A head may name as many keys as remain to be chosen, at most all others.
    """
    _check(rows, kv, logits)
    for name, x in (("count", count), ("recent", recent)):
        ok = isinstance(x, Tensor) and x.dtype in INTS and x.shape == rows.pos.shape and x.device == rows.q.device
        require(ok, lambda: f"{name}: expected int [R={rows.pos.shape[0]}] on {rows.q.device}, got {describe(x)}")
    for name, number, least in (("first", first, 0), ("most", most, 1)):
        ok = isinstance(number, int) and not isinstance(number, bool) and number >= least
        require(ok, lambda: f"{name}: expected a count >= {least}, got {number!r}")
    ballot: Ballot = SPREADING.get(impl, rows.q.device, rows, kv, logits)(
        rows, kv, logits, count, recent, first=first, most=most
    )
    return ballot


def rank_round_robin(
    ballot: Ballot, index: Tensor, used: Tensor, *, first_head: int = 0, heads: int | None = None, impl: str = "auto"
) -> Tensor:
    """The scores of all keys, fp32 [R, N]: ballot.scores, with the negative of its turn for each key that a head names.

    index, used: int32 [R, H, C] and [R, H] of `top_k(ballot.logits, ballot.depth, ...)`: each head's best keys, by
    ascending slot, which decides ties. first_head, heads: the number of this rank's first query head among all ranks'
    `heads`; None: all heads are here. The largest of the ranks' scores is the score of all heads.
    Writes to ballot.scores, and returns it.
    """
    require(isinstance(ballot, Ballot), lambda: f"ballot: expected a Ballot, got {describe(ballot)}")
    shape, device = ballot.depth.shape, ballot.logits.device
    ok = isinstance(index, Tensor) and index.dtype == torch.int32 and index.dim() == 3 and index.shape[:2] == shape
    wanted = f"int32 [R={shape[0]}, H={shape[1]}, C] on {device}"
    require(ok and index.device == device, lambda: f"index: expected {wanted}, got {describe(index)}")
    ok = isinstance(used, Tensor) and used.dtype == torch.int32 and used.shape == shape and used.device == device
    require(ok, lambda: f"used: expected int32 {list(shape)} on {device}, got {describe(used)}")
    total = shape[1] if heads is None else heads
    fits = isinstance(first_head, int) and isinstance(total, int) and 0 <= first_head <= total - shape[1]
    message = f"first_head, heads: expected this rank's {shape[1]} heads in [0, heads), got {first_head} and {total}"
    require(fits, message)
    turns = index.shape[2] * total
    require(
        turns <= MAX_TURN,
        lambda: f"index: expected lists of at most {MAX_TURN // total} keys for {total} heads, got more",
    )
    scores: Tensor = RANKING.get(impl, device, ballot)(ballot, index, used, first_head=first_head, heads=total)
    return scores


LARGEST_LOG_PROB = Op(largest_log_prob, LARGEST)
SPREAD_LOGITS = Op(spread_logits, SPREADING)
RANK_ROUND_ROBIN = Op(rank_round_robin, RANKING, ())


def _check(rows: Rows, kv: KVView, logits: Logits) -> None:
    check_memory(rows, kv)
    check_kept(logits, rows, kv)
    require(kv.slot_pos is None, "slot_pos: after eviction a slot holds another key in each head; expected none")
