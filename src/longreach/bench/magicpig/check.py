"""Checks of MagicPIG's step: keys against codes compared one by one, weights and outputs against fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longreach.bench.case import Memory
from longreach.bench.check import WrongResult, bound
from longreach.bench.magicpig.layers import Attended, SampledLayers
from longreach.ops.simhash import codes, inclusion

CHUNK = 1 << 14  # keys whose codes are compared at a time
DIFFER = 1e-3  # share of codes, and of a list's keys and weights, that rounding may change
WEIGHT = 1e-3  # by which a log-weight may be off


@dataclass(frozen=True)
class SampleVerdict:
    """heads: KV heads compared. error: the largest relative error (norms) of a query head's output over its own keys
    and weights, at most error_bound. other_keys: the largest share of a list's keys that comparing codes does not find,
    or finds in addition. other_weights: that of its log-weights that are off by more than WEIGHT. Both are at most
    DIFFER, not counting one key of a list. from_dense: mean and largest relative distance of a head's output from dense
    attention's.
    """

    heads: int
    error: float
    error_bound: float
    other_keys: float
    other_weights: float
    from_dense: dict[str, float]

    def recorded(self) -> dict[str, Any]:
        return {**vars(self)}


@torch.no_grad()
def check_layer(layers: SampledLayers) -> SampleVerdict:
    """The verdict on the method's step in the first layer, of some KV heads of some sequences.

    Raises WrongResult where a list overflowed, or where keys, weights or outputs differ beyond rounding.
    """
    name, shape, done = layers.preset.name, layers.inputs.shape, layers.one()
    if bool(done.lists.overflowed.any()):
        raise WrongResult(f"{name}: a list overflowed, and its head attended densely; its time does not count")
    found = [
        _Head(layers, done, seq, head).compared()
        for seq in sorted({0, shape.batch - 1})
        for head in sorted({0, shape.kv_heads - 1})
    ]
    error, keys, weights, apart = (torch.stack(list(x)) for x in zip(*found, strict=True))
    verdict = SampleVerdict(
        len(found), float(error.max()), bound(layers.inputs.dtype), float(keys.max()), float(weights.max()),
        {"mean": float(apart.mean()), "largest": float(apart.max())},
    )  # fmt: skip
    wrong = None
    if not bool(torch.isfinite(done.outcome.partial.out).all()):
        wrong = "its output is not finite"
    elif not verdict.other_keys <= DIFFER:
        wrong = f"{verdict.other_keys:.1%} of a list's keys are not those whose codes collide"
    elif not verdict.other_weights <= DIFFER:
        wrong = f"{verdict.other_weights:.1%} of a list's log-weights are off by more than {WEIGHT:g}"
    elif not verdict.error <= verdict.error_bound:
        wrong = f"relative error {verdict.error:.2e} over its own keys exceeds {verdict.error_bound:.1e}"
    if wrong:
        raise WrongResult(f"{name}: {wrong}; its time does not count")
    return verdict


class _Head:
    """One KV head of a sequence of the first layer, recomputed without tables."""

    def __init__(self, layers: SampledLayers, done: Attended, seq: int, head: int):
        shape, method = layers.inputs.shape, layers.method
        self.layers, self.done, self.seq, self.head = layers, done, seq, head
        self.group = shape.heads // shape.kv_heads
        self.mine = slice(head * self.group, (head + 1) * self.group)
        self.q = layers.inputs.q(0, 1)[seq, self.mine]
        self.k, self.v = (x[seq, head] for x in layers.inputs.kv(0, Memory()))
        self.first, self.stop = method.sinks, layers.stops[0]
        self.centre = self.k[self.first : self.first + method.centre].double().mean(0)
        self.hits = self._collisions()
        self.u = self._law()

    def _collisions(self) -> Tensor:
        """bool [g, N]: the keys that each query head samples, by comparing codes."""
        directions, method = self.layers.states[0].projections, self.layers.method
        mine = codes(self.q, directions, impl=self.layers.impl).view(torch.int16)
        differ = mine != codes(self.q, directions, impl="reference").view(torch.int16)
        if float(differ.double().mean()) > DIFFER:
            raise WrongResult(f"{self.layers.preset.name}: codes of queries differ beyond rounding")
        hits = torch.zeros(self.group, len(self.k), dtype=torch.bool, device=self.k.device)
        for at in range(self.first, self.stop, CHUNK):
            end = min(at + CHUNK, self.stop)
            theirs = codes(self.k[at:end], directions, centre=self.centre.float(), impl="reference").view(torch.int16)
            for h in range(self.group):
                hits[h, at:end] = (mine[h] == theirs).sum(-1) >= method.least
        return hits

    def _law(self) -> Tensor:
        """fp64 [g, N]: the probability that each query head samples a key."""
        q, k = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (self.q, self.k.double() - self.centre))
        p = 1 - torch.acos((q @ k.T).clamp(-1, 1)) / torch.pi
        return inclusion(p, self.layers.preset.bits, self.layers.preset.tables, self.layers.method.least)

    def compared(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """fp64: error, share of other keys, share of other weights, [g] distances from dense attention."""
        lists, own = self.done.lists, self.done.lists.per == "query"
        assert lists.log_weight is not None
        weight = torch.full(self.hits.shape, -torch.inf, dtype=torch.float64, device=self.k.device)
        keys, weights = [], []
        for h, number in enumerate(range(self.mine.start, self.mine.stop) if own else [self.head]):
            heads = slice(h, h + 1) if own else slice(None)
            n = int(lists.count[self.seq, number])
            index = lists.index[self.seq, number, :n].long()
            got = lists.log_weight[self.seq, number, :n].double()
            listed = torch.zeros_like(self.hits[0])
            listed[index] = True
            met = self.hits[heads].sum(0)
            keys.append(_share((listed != (met > 0)).sum(), n))
            want = met[index].double().log() - self.u[heads, index].sum(0).log()
            off = ((got - want).abs() > WEIGHT) | ~got.isfinite()
            weights.append(_share((off & (met[index] > 0)).sum(), n))
            weight[heads, index] = got
        weight[:, : self.first] = weight[:, self.stop :] = 0.0
        logits = self.q.double() @ self.k.double().T * self.layers.inputs.scale
        right, dense = ((logits + extra).softmax(-1) @ self.v.double() for extra in (weight, 0.0))
        out = self.done.outcome.partial.out[self.seq, self.mine].double()
        error, apart = ((out - x).norm(dim=-1) / x.norm(dim=-1) for x in (right, dense))
        return error.max().nan_to_num(torch.inf), torch.stack(keys).max(), torch.stack(weights).max(), apart


def _share(count: Tensor, of: int) -> Tensor:
    """A share; one key of a list may always differ."""
    return (count - 1).clamp(min=0).double() / max(1, of)
