"""Router and gates: how much each memory level weighs for a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longreach.mka.config import MKAConfig
from longreach.ops.route_fuse import RouterLayer, first_layer
from longreach.ops.types import HeadShard, accumulator

FEW = 8  # rows for which `first_layer` is faster than a matrix product


class Vector(nn.Module):
    """A trained vector. Its parameter is called `bias`: Trainer's rule gives such parameters no weight decay."""

    def __init__(self, values: Tensor):
        super().__init__()
        self.bias = nn.Parameter(values)


class Router(nn.Module):
    """lambda = softmax(MLP(q)) over the levels in use (Algorithm 1 and 2), and the gates around it.

    Weights of the levels are start + gate (lambda - start), with one gate a level: at gate 0 the layer is the one that
    was converted, at gate 1 the paper's. Gates have no upper bound: a summary of B keys learns a weight near B.
    """

    def __init__(self, config: MKAConfig, heads: int, dim: int, gate: float = 1.0):
        """heads, dim: of the queries of all ranks. gate: first value of every gate."""
        super().__init__()
        self.config, self.heads, self.dim = config, heads, dim
        levels = len(config.tiers)
        self.gate = Vector(torch.full((levels,), gate))
        if config.routing != "fixed":
            self.up = nn.Linear(heads * dim, config.router_width)
            self.down = nn.Linear(config.router_width, levels)

    def forward(self, q: Tensor, blocks: Tensor | None = None, shard: HeadShard | None = None) -> Tensor:
        """Weights of the levels: fp32 (fp64 for fp64) [R, levels].

        q: [R, H, D], queries before rotation. blocks: bool [R], whether complete blocks lie before the row's window;
        None: no level needs any. Level 3, and level 2 of block_mka, have no keys without: such a level weighs 0, and is
        masked before the softmax, so that lambda of the others sums to 1.
        shard: the heads of this rank, if q has those alone; the router's hidden layer is summed over ranks.
        """
        wide = accumulator(q.dtype)
        there = self._available(q, blocks)
        routed = self._lambda(q, there, shard, wide)
        # level by level: a tensor of numbers would be copied to the device, which no CUDA graph permits
        start = torch.stack([kept * value for kept, value in zip(there.to(wide).unbind(1), self.config.start)], 1)
        return start + self.gate.bias.to(wide) * (routed - start)

    def lambdas(self, q: Tensor, blocks: Tensor | None = None, shard: HeadShard | None = None) -> Tensor:
        """lambda [R, levels], the weights before the gates. Arguments and dtype as for `forward`."""
        return self._lambda(q, self._available(q, blocks), shard, accumulator(q.dtype))

    @property
    def splits(self) -> bool:
        """Whether `second_layer` stands for the whole router: two levels, and no hooks or adapters on its modules."""
        layers = () if self.config.routing == "fixed" else (self.up, self.down)
        plain = all(type(m) is nn.Linear and type(m.weight) is nn.Parameter for m in layers)
        hooked = any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in (self, *layers))
        return self.config.variant == "fastmka" and self.config.tiers == (1, 2) and plain and not hooked

    def second_layer(self, q: Tensor, shard: HeadShard | None = None, impl: str = "auto") -> RouterLayer:
        """The first layer computed, the second as `ops.route_fuse` takes it. q, shard: as for `forward`."""
        if self.config.routing == "fixed":
            return RouterLayer(self.gate.bias)
        down, hard = self.down, self.config.routing == "top1"
        return RouterLayer(self.gate.bias, self._hidden(q, shard, impl), down.weight, down.bias, hard)

    def _available(self, q: Tensor, blocks: Tensor | None) -> Tensor:
        """bool [R, levels]: whether a level has keys for a row."""
        needs = [tier == 3 or (tier == 2 and self.config.variant == "block_mka") for tier in self.config.tiers]
        there = torch.ones(q.shape[0], len(needs), dtype=torch.bool, device=q.device)
        if blocks is None:
            return there
        return torch.stack([blocks if need else kept for need, kept in zip(needs, there.unbind(1))], 1)

    def _lambda(self, q: Tensor, there: Tensor, shard: HeadShard | None, wide: torch.dtype) -> Tensor:
        if self.config.routing == "fixed":
            return there.to(wide) / there.sum(-1, keepdim=True)
        logits = self.down(F.silu(self._hidden(q, shard))).to(wide).masked_fill(~there, -torch.inf)
        soft = logits.softmax(-1)
        if self.config.routing == "learned":
            return soft
        kept = min(int(self.config.routing.removeprefix("top")), soft.shape[-1])
        mask = torch.zeros_like(soft).scatter(-1, soft.topk(kept, -1).indices, 1.0)
        hard = soft * mask
        hard = hard / hard.sum(-1, keepdim=True)
        return hard.detach() + soft - soft.detach()  # straight-through: values of the choice, gradients of the softmax

    def _hidden(self, q: Tensor, shard: HeadShard | None, impl: str | None = None) -> Tensor:
        """[R, router_width]. impl: of `first_layer`, for few rows without gradients; None: matrix products."""
        q = q.to(self.up.weight.dtype)  # under autocast q has fewer bits than parameters in fp32
        few = impl if len(q) <= FEW else None
        if shard is None or shard.count == shard.total:
            if few is None:
                return self.up(q.flatten(1))
            return first_layer(q.flatten(1), self.up.weight, self.up.bias, impl=few)
        per = self.dim * self.heads // shard.total  # columns of one KV head's query heads
        columns = self.up.weight.narrow(1, shard.first * per, shard.count * per)
        part = F.linear(q.flatten(1), columns) if few is None else first_layer(q.flatten(1), columns, None, impl=few)
        return shard.sum(part) + self.up.bias


def at_least_zero(weights: Tensor) -> Tensor:
    """Weights of a mixture [..., levels], none negative: 0 instead, with the gradient of the weight itself.

    Where no level has a weight above 0, level 1 has 1, as it has keys for every row. The gradient stays that of the
    weights, so that training can raise them again.
    """
    positive = weights.detach().clamp(min=0)
    none = (positive == 0).all(-1)
    positive = torch.cat([positive[..., :1].masked_fill(none[..., None], 1.0), positive[..., 1:]], -1)
    return positive + (weights - weights.detach()) if weights.requires_grad else positive
