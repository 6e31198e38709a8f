"""A few layers with any number of heads, read and decoded by a method: random queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longreach.cache import CacheConfig, KVCache
from longreach.methods.base import AttentionMethod, LayerCall, ModelShape, Outcome, state_of
from longreach.ops import HeadShard, Lists, Rows
from longreach.testing.oracle import Exact, exact_attend

CACHES = {"contiguous": CacheConfig(), "paged": CacheConfig("paged", page=5)}


class Layers:
    """`pass_` appends random tokens to slots and lets the method follow (prompt) or run (decoding) in each layer."""

    def __init__(
        self, method: AttentionMethod, *, group: int = 2, heads: int = 2, dim: int = 16, layers: int = 1,
        slots: int = 3, config: CacheConfig | None = None, seed: int = 0, dtype: torch.dtype = torch.float32,
        **call: Any,
    ):  # fmt: skip
        self.method, self.heads, self.group, self.dim, self.dtype, self.call = method, heads, group, dim, dtype, call
        self.model = ModelShape(layers, heads * group, heads, dim, config="that of the tests")
        self.cache = KVCache(layers, slots, config)
        self.draw = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw).to(self.dtype)

    def read(self, slots: Sequence[int], counts: Sequence[int], **given: Tensor) -> list[LayerCall]:
        """Tokens of prompts. given: q [R, H, D] or k [R, G, D], the same in each layer."""
        return [call for call, _ in self.pass_(slots, counts, follow=True, **given)]

    def decode(self, slots: Sequence[int], **given: Tensor) -> list[tuple[LayerCall, Outcome]]:
        """One token each: (call, outcome) of each layer."""
        found = self.pass_(slots, [1] * len(slots), **given)
        return [(call, outcome) for call, outcome in found if outcome is not None]

    def pass_(
        self, slots: Sequence[int], counts: Sequence[int], follow: bool = False, **given: Tensor
    ) -> list[tuple[LayerCall, Outcome | None]]:
        step, rows = self.cache.begin(slots, counts), sum(counts)
        found: list[tuple[LayerCall, Outcome | None]] = []
        passed: dict[Any, Any] = {}
        for layer in range(self.model.layers):
            heads = {"q": self.heads * self.group, "k": self.heads, "v": self.heads}
            q, k, v = (given[x] if x in given else self.random(rows, n, self.dim) for x, n in heads.items())
            self.cache.append(layer, step, k, v)
            call = LayerCall(
                layer, Rows(q, step.seq, step.pos, step.runs), self.cache.view(layer, step), step.slots,
                self.dim**-0.5, shard=HeadShard.whole(self.heads), model=self.model, passed=passed, **self.call,
            )  # fmt: skip
            state = state_of(self.method, self.cache, call)
            if follow:
                self.method.follow(call, state)
                found.append((call, None))
            else:
                found.append((call, self.method.run(call, state)))
        self.cache.commit(step)
        return found


def keys_of(call: LayerCall, row: int) -> Tensor:
    """fp64 [N, G, D]: the keys that a row sees."""
    slots = torch.arange(int(call.rows.pos[row]) + 1)
    page, offset = call.kv.locate(call.rows.seq[row], slots)
    return call.kv.k[page, :, offset].double()


def logits_of(call: LayerCall, row: int) -> Tensor:
    """fp64 [H, N]: of the keys that a row sees."""
    keys = keys_of(call, row).repeat_interleave(call.rows.q.shape[1] // call.kv.heads, 1)
    x = torch.einsum("nhd,hd->hn", keys, call.rows.q[row].double()) * call.scale
    return x if call.softcap is None else call.softcap * torch.tanh(x / call.softcap)


def probabilities_of(call: LayerCall, row: int) -> Tensor:
    """fp64 [H, N]: those that exact attention gives the keys that a row sees."""
    x = logits_of(call, row)
    sink = torch.full((x.shape[0], 1), -torch.inf) if call.sink_logit is None else call.sink_logit[:, None]
    return torch.cat([x, sink.double()], 1).softmax(-1)[:, :-1]


def chosen_by(outcome: Outcome, row: int, head: int) -> list[int]:
    """Entries of the list that a KV head attends to, as they stand there."""
    lists = outcome.reads.values[-1]
    assert isinstance(lists, Lists) and lists.per == "kv"
    head = min(head, lists.index.shape[1] - 1)
    return lists.index[row, head, : int(lists.count[row, head])].tolist()


def exact(call: LayerCall, outcome: Outcome) -> Exact:
    """fp64 attention over what was attended to."""
    return exact_attend(
        call.rows, call.kv, outcome.reads.values[-1],
        scale=call.scale, softcap=call.softcap, sink_logit=call.sink_logit,
    )  # fmt: skip


def highest(scores: Tensor, count: int) -> list[int]:
    """The entries with the highest scores, the older first among equals, in ascending order."""
    return sorted(sorted(range(scores.shape[0]), key=lambda n: (-float(scores[n]), n))[:count])


def assert_halves_agree(method: AttentionMethod, group: int) -> None:
    """Two ranks, a KV head each with its group of query heads, choose what one process with both chooses."""
    layers = Layers(method, heads=2, group=group, layers=1, slots=2)
    layers.read([0, 1], [40, 11])
    ((call, _),) = layers.decode([0, 1])
    whole = call.passed[method]
    assert isinstance(whole, Lists)
    said: list[torch.Tensor] = []

    def half(head: int, total: Any) -> LayerCall:
        kv = replace(call.kv, k=call.kv.k[:, head : head + 1], v=call.kv.v[:, head : head + 1])
        rows = Rows(call.rows.q[:, group * head : group * (head + 1)], call.rows.seq, call.rows.pos)
        return replace(call, rows=rows, kv=kv, shard=HeadShard(head, 1, 2, total), passed={})

    for head in (0, 1):
        method.run(half(head, lambda x: said.append(x) or x), None)
    for head in (0, 1):
        again = half(head, lambda x, other=said[1 - head]: x + other)
        method.run(again, None)
        chosen = again.passed[method]
        for row in range(2):
            n = int(whole.count[row, 0])
            assert int(chosen.count[row, 0]) == n
            assert torch.equal(chosen.index[row, 0, :n], whole.index[row, 0, :n])
