"""FastMKA: keys and values of the levels mixed into one before attention (Algorithm 2, Route-Fused MKA).

Everything happens between the projections and what follows them (key norms, rotation, any attention, any cache):

    k = w_1 k_1 + w_2 k_2 + w_3 k_3    v the same

with k_2, v_2 the session level, and k_3, v_3 the mean key and value of recalled blocks, weighted by their scores. The
cache holds k and v: it is as long as dense attention's. (The paper's cache of a third of the size does not follow from
its algorithm.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longreach.mka.config import EDGE, MKAConfig
from longreach.mka.levels import Levels
from longreach.mka.session import session
from longreach.ops.carry import CarryMemory, ScanCarry
from longreach.ops.recall import signs
from longreach.ops.route_fuse import route_fuse
from longreach.ops.types import HeadShard, accumulator

AT_ONCE = 1 << 25  # scores of blocks that are held together


@dataclass(frozen=True)
class FastMemory:
    """The state of a layer after some tokens: of a pass, or of a cache.

    carry: of the session level, over keys and values side by side: mean [B, G, 2 D]; None without level 2. Memory of
        carries is written in place by the function that takes it, and is then the state after its rows.
    sums: [B, units, G, 2 D], sums of keys and values of each block so far, as wide as `carry`; None without level 3.
    """

    carry: ScanCarry | CarryMemory | None
    sums: Tensor | None

    @classmethod
    def empty(cls, config: MKAConfig, sequences: int, units: int, kv_heads: int, dim: int, dtype: torch.dtype,
              device: torch.device | str) -> FastMemory:  # fmt: skip
        """Before the first token. units: blocks that the longest sequence may touch."""
        wide = accumulator(dtype)
        carry = ScanCarry.empty(sequences, kv_heads, 2 * dim, dtype=wide, device=device)
        sums = torch.zeros(sequences, units, kv_heads, 2 * dim, dtype=wide, device=device)
        return cls(carry if config.keeps_means else None, sums if config.keeps_sums else None)


def fuse(
    levels: Levels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: Tensor,
    pos: Tensor,
    counts: Sequence[int],
    memory: FastMemory,
    *,
    scale: float,
    shard: HeadShard | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, FastMemory, Tensor]:
    """Mixed keys and values, the memory after the rows, and the weights of the levels [R, levels].

    q [R, H, D], k, v [R, G, D]: of the projections, in the model's dtype, before norms and rotation; of this rank's
    heads if `shard` says so. seq, pos: int [R]; counts: rows of each sequence, which follow each other in its order.
    scale: of q.k, for level 3's scores. Differentiable; at gate 0 the result is k and v, bit for bit.
    A pass without gradients of at most one row for each sequence, such as a decode step, takes `ops.route_fuse`.
    """
    config, first = levels.config, 0 if shard is None else shard.first
    parts_k, parts_v, recalled = [k], [v], None
    carry, sums = memory.carry, memory.sums
    if carry is not None and max(counts, default=0) <= 1 and not torch.is_grad_enabled() and levels.router.splits:
        router, decay = levels.router.second_layer(q, shard, impl), levels.decay_logits(first, k.shape[1])
        means = carry if isinstance(carry, CarryMemory) else CarryMemory.copy_of(carry)
        k, v, weights = route_fuse(k, v, router, decay, seq, pos, means, limit=EDGE, impl=impl)
        after = carry if carry is means else ScanCarry(means.mean[:, 0], means.weight[:, 0])
        return k, v, FastMemory(after, None), weights
    if carry is not None:
        decay = levels.rate(first, k.shape[1])
        k2, v2, carry = session(k, v, decay, seq, pos, carry, impl=impl)
        parts_k, parts_v = [*parts_k, k2], [*parts_v, v2]
    if sums is not None:
        sums = _added(sums, torch.cat([k, v], -1), seq, pos, config.block)
        stop = torch.clamp(pos // config.block - config.window // config.block, min=0)
        recalled = stop > 0
        k3, v3 = _recalled(levels, q, sums, stop, counts, scale).split((k.shape[-1], v.shape[-1]), -1)
        parts_k, parts_v = [*parts_k, k3], [*parts_v, v3]
    weights = levels.router(q, recalled, shard)
    return _mixed(parts_k, weights), _mixed(parts_v, weights), FastMemory(carry, sums), weights


def _mixed(parts: list[Tensor], weights: Tensor) -> Tensor:
    total = weights[:, 0, None, None] * parts[0]
    for level in range(1, len(parts)):
        total = total + weights[:, level, None, None] * parts[level]
    return total.to(parts[0].dtype)


def _added(sums: Tensor, x: Tensor, seq: Tensor, pos: Tensor, block: int) -> Tensor:
    """Sums of blocks with the rows x [R, G, 2 D] added."""
    place = seq.long() * sums.shape[1] + pos.long() // block
    return sums.flatten(0, 1).index_add(0, place, x.to(sums.dtype)).view_as(sums)


def _recalled(levels: Levels, q: Tensor, sums: Tensor, stop: Tensor, counts: Sequence[int], scale: float) -> Tensor:
    """[R, G, 2 D]: mean keys and values of the recalled blocks of each row, weighted by their scores; 0 for none."""
    means = sums / levels.config.block
    if all(count == 1 for count in counts):  # a decode step: one row a sequence
        return _recalled_of(levels, q, means, stop, scale)
    at_once = max(1, AT_ONCE // (q.shape[1] * sums.shape[1]))
    found = [means.new_zeros(0, *means.shape[2:])]
    rows = zip(q.split(list(counts)), stop.split(list(counts)), means.unbind(0), strict=True)
    for queries, stops, mean in rows:
        for some, ends in zip(queries.split(at_once), stops.split(at_once), strict=True):
            given = (levels, some, mean, ends, scale)
            # scores of all blocks are made again for the backward: held, they would be larger than attention's own
            again = torch.is_grad_enabled() and len(queries) > at_once
            found.append(checkpoint(_recalled_of, *given, use_reentrant=False) if again else _recalled_of(*given))
    return torch.cat(found)


def _recalled_of(levels: Levels, q: Tensor, means: Tensor, stop: Tensor, scale: float) -> Tensor:
    """means: [n, G, 2 D] of the one sequence that all rows belong to, or [R, n, G, 2 D], one for each row."""
    config, kv_heads, dim, units = levels.config, means.shape[-2], q.shape[2], means.shape[-3]
    own = "r" if means.dim() == 4 else ""
    keys = means[..., :dim]
    hidden = torch.arange(units, device=q.device) >= stop[:, None, None]  # [R, 1, n]
    grouped = q.to(means.dtype).unflatten(1, (kv_heads, -1))
    if config.recall == "hash":
        codes = (signs(x.detach(), levels.planes).to(means.dtype) for x in (grouped, keys))
        score = torch.einsum(f"rghp,{own}ngp->rgn", *codes)
    else:
        logits = torch.einsum(f"rghd,{own}ngd->rghn", grouped, keys) * scale
        top = logits.masked_fill(hidden[:, :, None], -torch.inf).softmax(-1)
        score = torch.nan_to_num(top, nan=0.0).sum(2)
    score = score.masked_fill(hidden, -torch.inf)
    # among equal scores the later block: topk's own order depends on shapes
    best = units - 1 - score.detach().flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., : config.blocks]
    chosen = score.gather(-1, best)
    there = chosen > -torch.inf
    if config.recall == "hash":  # shares of bits that agree
        chosen = chosen.softmax(-1)
    else:
        chosen = chosen.masked_fill(~there, 0.0)
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp(min=torch.finfo(chosen.dtype).tiny)
    chosen = torch.where(there, chosen, 0.0)
    share = torch.zeros_like(score).scatter(-1, best, chosen)
    return torch.einsum(f"rgn,{own}ngx->rgx", share, means)
