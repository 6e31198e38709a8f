"""How much a question attends to each token of its prompt (A3, arXiv 2511.17560, Eq. 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longreach.methods.call import LayerCall
from longreach.methods.slots import PromptParts, slots_seen
from longreach.ops.doors import EVERYTHING, Read

ROWS = 64  # of the question, scored at a time: [ROWS, H, N] logits are held


def attention_by_head(prompt: PromptParts, call: LayerCall) -> Tensor:
    """fp32 [N]: a softmax for each row of the call and query head, summed over them and over ranks."""
    total = call.rows.q.new_zeros(len(prompt.stored), dtype=torch.float32)
    count, first = len(call.rows.pos), prompt.question
    for index in torch.arange(count, device=total.device).split(ROWS):
        some = call if count <= ROWS else call.take(index)
        seen, first = call.kv.heads * slots_seen(first, len(index)), first + len(index)
        lse, logits = some.op("score_keys", counted=seen)
        one = torch.zeros_like(some.rows.pos)
        pooled = some.op("pooled_scores", lse=lse, logits=logits, tile=one, tiles=1, counted=seen)
        total += pooled[0, :, : len(total)].sum(0)
    return call.sum_over_ranks(total)


def attention_of_all_heads(prompt: PromptParts, call: LayerCall) -> Tensor:
    """fp32 [N]: one softmax a row, of logits summed over heads, over sqrt(H D); the mean of 5 neighbours.

    What stands before the first chunk is left out before the softmax.
    """
    count, rows = len(prompt.stored), call.rows
    group = rows.q.shape[1] // call.kv.heads
    # heads' logits add up to one product: the query heads of a KV head are summed before it
    q = rows.q.float().unflatten(1, (call.kv.heads, group)).sum(2).flatten(1)
    slots = torch.arange(count, device=q.device)
    page, offset = call.kv.locate(torch.zeros_like(slots), slots)
    keys = call.kv.k[page, :, offset].float().flatten(1)
    seen = call.kv.heads * slots_seen(prompt.question, len(rows.pos))
    call.count_read(Read.of(call.kv, EVERYTHING, values=False, counted=seen))
    heads = rows.q.shape[1] if call.shard is None else group * call.shard.total
    logits = call.sum_over_ranks(q @ keys.T) * (heads * rows.q.shape[2]) ** -0.5
    first = int(prompt.stored.int().argmax())
    logits = logits.masked_fill((slots > rows.pos[:, None]) | (slots < first), -torch.inf)
    scores = logits.softmax(-1).sum(0)
    return F.avg_pool1d(scores[None, None], 5, stride=1, padding=2, count_include_pad=False)[0, 0]
