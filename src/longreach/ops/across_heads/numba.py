"""across_heads on a CPU, compiled by Numba, from kept logits."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.across_heads import numba_kernels as kernels
from longreach.ops.across_heads.api import Ballot
from longreach.ops.numba_inputs import floats, reach_of, refuse
from longreach.ops.numba_math import in_threads
from longreach.ops.types import KVView, Logits, Rows


def largest_log_prob(rows: Rows, kv: KVView, lse: Tensor, logits: Logits) -> Tensor:
    refuse("largest_log_prob", rows, kv, lse, logits)
    count, heads, group = rows.q.shape[0], kv.heads, kv.group(rows)
    found = torch.empty(count, kv.capacity)
    x = floats(logits.x).reshape(count, heads, kv.capacity * group)
    base = floats(lse).reshape(count, heads, group)
    in_threads(
        torch.get_num_threads(), kernels.largest_log_prob, x, base, reach_of(rows, kv), found.numpy()
    )  # fmt: skip
    return found


def spread_logits(
    rows: Rows, kv: KVView, logits: Logits, count: Tensor, recent: Tensor, *, first: int, most: int
) -> Ballot:
    refuse("spread_logits", rows, kv, logits)
    lists, heads, group = rows.q.shape[0], kv.heads, kv.group(rows)
    reach = torch.from_numpy(reach_of(rows, kv))
    late = reach - recent.long()
    others = (late - first).clamp(min=0)
    depth = torch.minimum((count.long().clamp(max=most) - (reach - others)).clamp(min=0), others)
    x = floats(logits.x).reshape(lists, heads, kv.capacity * group)
    spread, scores = torch.empty(lists, heads * group, kv.capacity), torch.empty(lists, kv.capacity)
    in_threads(
        torch.get_num_threads(), kernels.spread_logits, x, first, late.numpy(), reach.numpy(), spread.numpy(),
        scores.numpy(),
    )  # fmt: skip
    return Ballot(spread, depth.int()[:, None].repeat(1, heads * group), scores)


def rank_round_robin(ballot: Ballot, index: Tensor, used: Tensor, *, first_head: int, heads: int) -> Tensor:
    refuse("rank_round_robin", ballot.logits, ballot.scores)
    logits, scores = ballot.logits.contiguous(), ballot.scores
    kernels.rank(
        logits.numpy(), index.contiguous().numpy(), used.contiguous().numpy(), first_head, heads, scores.numpy()
    )  # fmt: skip
    return scores
