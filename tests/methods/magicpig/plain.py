"""MagicPIG by its definition, one row and head at a time, in fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longreach.methods.call import LayerCall
from longreach.methods.magicpig import MagicPIG
from longreach.ops.simhash import projections
from tests.methods.one_layer import keys_of


def sealed(method: MagicPIG, tokens: int, layer: int = 0) -> int:
    """The end of the keys in a layer's tables, found by appending one token after the other: each may bring one block.

    Each layer's first block is shorter than that of the layer before, by an odd number of positions, or longer.
    """
    step = 2 * math.floor((round(method.seal * (math.sqrt(5) - 1) / 2)) / 2) + 1
    stop, edge = 0, method.seal
    for _ in range(layer):
        edge -= step % method.seal
        edge += method.seal * (edge <= 0)
    for n in range(1, tokens + 1):
        left = n - method.local
        if left >= max(method.seal, method.sinks + method.centre) and left >= edge:
            stop, edge = edge, edge + method.seal
    return max(stop, method.sinks)


def inclusion(method: MagicPIG, cosine: float) -> float:
    x = (1 - math.acos(max(-1.0, min(1.0, cosine))) / math.pi) ** method.bits
    n = method.tables
    u = math.fsum(math.comb(n, j) * x**j * (1 - x) ** (n - j) for j in range(method.least, n + 1))
    return max(u, method.floor)


def weights(method: MagicPIG, call: LayerCall, row: int, tokens: int) -> Tensor:
    """fp64 [H, N]: the log-weight of each key that a row sees, -inf for those it does not attend to.

    tokens: of its sequence before the pass.
    """
    keys, group = keys_of(call, row), call.rows.q.shape[1] // call.kv.heads
    stop, heads = sealed(method, tokens), call.rows.q.shape[1]
    centre = torch.zeros_like(keys[0])
    if method.centre and stop > method.sinks:
        centre = keys[method.sinks :][: method.centre].mean(0).float().double()
    directions = projections(keys.shape[2], method.bits, method.tables, method.seed).double()
    found = torch.zeros(heads, keys.shape[0], dtype=torch.float64)
    found[:, method.sinks : stop] = -torch.inf
    limit = method.capacity if isinstance(method.capacity, int) else math.ceil(method.capacity * keys.shape[0])
    for g in range(call.kv.heads):
        shifted = keys[method.sinks : stop, g] - centre[g]
        hashed = torch.einsum("nd,lbd->nlb", shifted, directions) > 0
        met, chance = list[Tensor](), list[Tensor]()
        for h in range(g * group, (g + 1) * group):
            q = call.rows.q[row, h].double()
            same = (hashed == (directions @ q > 0)).all(-1).sum(-1)
            cosine = torch.nn.functional.cosine_similarity(shifted, q[None], dim=-1)
            met.append(same >= method.least)
            chance.append(torch.tensor([inclusion(method, c) for c in cosine.tolist()], dtype=torch.float64))
        if method.share == "group":
            together = torch.stack(met).sum(0)
            sampled = [together > 0] * group
            weight = [together.double().log() - torch.stack(chance).sum(0).log()] * group
        else:
            sampled, weight = met, [-u.log() for u in chance]
        for n, (mine, log) in enumerate(zip(sampled, weight, strict=True)):
            some = torch.where(mine, log, -torch.inf) if int(mine.sum()) <= limit else torch.zeros_like(log)
            found[g * group + n, method.sinks : stop] = some
    return found


def attended(call: LayerCall, row: int, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 (out [H, D], lse [H]) of a row by these log-weights [H, N]."""
    group = call.rows.q.shape[1] // call.kv.heads
    page, offset = call.kv.locate(call.rows.seq[row], torch.arange(int(call.rows.pos[row]) + 1))
    keys, values = (x[page, :, offset].double().repeat_interleave(group, 1) for x in (call.kv.k, call.kv.v))
    x = torch.einsum("nhd,hd->hn", keys, call.rows.q[row].double()) * call.scale + log_weight
    return torch.einsum("hn,nhd->hd", x.softmax(-1), values), x.logsumexp(-1)
