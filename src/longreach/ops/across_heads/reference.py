"""across_heads in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.across_heads.api import Ballot
from longreach.ops.across_heads.by_sorting import rank
from longreach.ops.reference_chunks import past_reach
from longreach.ops.types import KVView, Logits, Rows


def largest_log_prob(rows: Rows, kv: KVView, lse: Tensor, logits: Logits) -> Tensor:
    x = logits.natural(kv.capacity)  # [R, G, N, group]
    found = (x - lse.to(x.dtype).unflatten(1, (kv.heads, 1, -1))).amax((1, 3))
    return found.masked_fill(past_reach(rows, kv)[:, 0], torch.nan)


def spread_logits(
    rows: Rows, kv: KVView, logits: Logits, count: Tensor, recent: Tensor, *, first: int, most: int
) -> Ballot:
    reach = torch.minimum(kv.seq_lens[rows.seq.long()].long(), rows.pos.long() + 1).clamp(min=0)
    count, recent = count.long().clamp(max=most), recent.long()
    slot = torch.arange(kv.capacity, device=reach.device)
    late, early = slot >= (reach - recent)[:, None], slot < first
    others = (reach - recent - first).clamp(min=0)
    depth = torch.minimum((count - (reach - others)).clamp(min=0), others)
    x = logits.natural(kv.capacity).float().transpose(2, 3).flatten(1, 2)  # [R, H, N]
    x = x.masked_fill((late | early)[:, None], -torch.inf)
    scores = torch.full_like(x[:, 0], -torch.inf).masked_fill(early, 1.0).masked_fill(late, 2.0)
    return Ballot(x, depth.int()[:, None].repeat(1, x.shape[1]), scores)


def rank_round_robin(ballot: Ballot, index: Tensor, used: Tensor, *, first_head: int, heads: int) -> Tensor:
    return rank(ballot.logits, ballot.scores, index, used, first_head, heads)
