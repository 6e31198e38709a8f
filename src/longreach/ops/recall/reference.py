"""recall in plain PyTorch: rows of one sequence at a time, some of them at once. And the codes of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops import reference_chunks as chunks
from longreach.ops.recall.codes import BlockCode, Pool
from longreach.ops.types import KVView, Partial, Pieces, Rows, accumulator

AT_ONCE = 1 << 24  # numbers of keys that are gathered at a time


def recall(
    rows: Rows, blocks: KVView, start: Tensor | None, stop: Tensor, *, count: int, scale: float, pool: Pool
) -> tuple[Tensor, Tensor]:
    held = blocks.seq_lens[rows.seq.long()].long()
    first = torch.zeros_like(held) if start is None else start.long().clamp(min=0)
    last = torch.minimum(stop.long(), held)
    index = torch.zeros(len(held), blocks.heads, count, dtype=torch.int32, device=held.device)
    used = (last - first).clamp(0, count)
    for some in chunks.steps(rows, blocks):
        if not int(used[some].max()):
            continue
        lowest, highest = int(first[some].min()), int(last[some].max())
        n = torch.arange(lowest, highest, device=held.device)
        allowed = (n >= first[some][:, None]) & (n < last[some][:, None])
        scores = _scores(rows.q[some], blocks, rows.seq[some[0]], n, allowed, scale, pool)
        chosen = _highest(scores, allowed[:, None].expand_as(scores), used[some])
        width = min(count, len(n))
        listed = torch.where(chosen, n, highest).topk(width, -1, largest=False, sorted=True).values
        index[some, :, :width] = listed.where(listed < highest, 0).int()
    return index, used[:, None].expand(-1, blocks.heads).to(torch.int32).contiguous()


def _scores(q: Tensor, blocks: KVView, seq: Tensor, n: Tensor, allowed: Tensor, scale: float, pool: Pool) -> Tensor:
    """[r, G, n]: scores of blocks n of one sequence."""
    wide = accumulator(q.dtype)
    codes = chunks.read(blocks.k, blocks, seq, n, slice(None), wide)
    x = chunks.logits(q.to(wide), codes, 1.0 if pool == "sum" else scale, None)  # [H, r, n]
    if pool == "softmax":
        x = x.masked_fill(~allowed, -torch.inf).softmax(-1)  # NaN where nothing is allowed, which is not looked at
    x = x.unflatten(0, (blocks.heads, -1)).sum(1).transpose(0, 1)
    return x * scale if pool == "sum" else x  # scaled once, so that equal sums of integers stay equal


def _highest(scores: Tensor, allowed: Tensor, used: Tensor) -> Tensor:
    """bool [r, G, n]: the `used` [r] highest scores of each row, among equal ones the later."""
    x = torch.where(allowed, scores.nan_to_num(-torch.inf, torch.inf, -torch.inf), -torch.inf)
    top = x.topk(int(used.max()), -1).values
    least = top.gather(-1, (used - 1).clamp(min=0)[:, None, None].expand(-1, x.shape[1], 1))
    over = (x > least) & allowed
    tied = (x == least) & allowed
    left = used[:, None] - over.sum(-1)
    after = tied.flip(-1).cumsum(-1).flip(-1)  # tied blocks from each one on, itself included
    return over | (tied & (after <= left[..., None]))


def attend_summaries(
    rows: Rows, blocks: KVView, start: Tensor | None, stop: Tensor, *, count: int | None, scale: float
) -> tuple[Pieces, Tensor | None, Tensor | None]:
    """In one piece. count: of blocks to choose, None for no choice."""
    index = used = None
    if count is not None:
        index, used = recall(rows, blocks, start, stop, count=count, scale=scale, pool="softmax")
    held, wide = blocks.seq_lens[rows.seq.long()].long(), accumulator(rows.q.dtype)
    first = torch.zeros_like(held) if start is None else start.long().clamp(min=0)
    last = torch.minimum(stop.long(), held)
    found = Partial.empty(*rows.q.shape, dtype=wide, device=held.device)
    for some in chunks.steps(rows, blocks):
        lowest, highest = int(first[some].min()), int(last[some].max())
        if lowest >= highest:
            continue
        n = torch.arange(lowest, highest, device=held.device)
        k, v = (chunks.read(x, blocks, rows.seq[some[0]], n, slice(None), wide) for x in (blocks.k, blocks.v))
        allowed = (n >= first[some][:, None]) & (n < last[some][:, None])
        x = chunks.logits(rows.q[some].to(wide), k, scale, None).masked_fill(~allowed, -torch.inf)  # [H, r, n]
        lse = x.logsumexp(-1)
        weight = torch.exp(x - lse[..., None]).masked_fill(~allowed, 0.0).unflatten(0, (blocks.heads, -1))
        found.out[some] = torch.einsum("ghrn,gnd->rghd", weight, v).flatten(1, 2)
        found.lse[some] = lse.transpose(0, 1)
    return Pieces.of(found), index, used


def code_rows(q: Tensor, pos: Tensor, code: BlockCode) -> Tensor:
    return code.of_rows(q, pos)


def code_blocks(
    kv: KVView, codes: Tensor, code: BlockCode, seq: Tensor, block: Tensor, per: int, *, in_slots: bool,
    means: Tensor | None,
) -> None:  # fmt: skip
    """in_slots: `block` holds slots; each stands for the block that it is the last slot of, if it is."""
    seq, block = seq.long(), block.long()
    if in_slots:
        block = torch.where(block % per == per - 1, block // per, -1)
    some = ((block >= 0) & ((block + 1) * per <= kv.seq_lens[seq])).nonzero()[:, 0]
    piece = max(1, AT_ONCE // (per * kv.heads * kv.k.shape[3]))
    for part in some.split(piece):
        first = block[part] * per
        page, offset = kv.locate(seq[part][:, None], first[:, None] + torch.arange(per, device=first.device))
        k = kv.k[page, :, offset].transpose(1, 2)  # [n, G, per, D]
        number = first // kv.page
        unit = block[part] - -(-number * kv.page // per)  # of the blocks that begin in its page
        codes[page[:, 0], :, unit] = code.of_blocks(k, first[:, None].expand(-1, kv.heads))
        if means is not None:
            v = kv.v[page, :, offset].transpose(1, 2)
            means[page[:, 0], :, unit] = v.to(accumulator(v.dtype)).mean(2).to(v.dtype)
