"""A few layers with any number of heads, read and decoded by a method: random queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longreach import runtime
from longreach.cache import CacheConfig, KVCache, SequenceState
from longreach.methods.base import AttentionMethod, Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.dense import Dense
from longreach.ops import HeadShard, Lists, Rows
from longreach.runtime import Segment, StateStore
from longreach.testing.oracle import Exact, exact_attend

CACHES = {"contiguous": CacheConfig(), "paged": CacheConfig("paged", page=5)}


class Layers:
    """Random tokens in slots, in a runtime pass: `read` those of prompts, which the method observes, or `decode` one.

    The calls of a prompt are dense attention's, which reads it.
    """

    def __init__(
        self, method: AttentionMethod, *, group: int = 2, heads: int = 2, dim: int = 16, layers: int = 1,
        slots: int = 3, config: CacheConfig | None = None, seed: int = 0, dtype: torch.dtype = torch.float32,
        **terms: Any,
    ):  # fmt: skip
        self.method, self.heads, self.group, self.dim, self.dtype = method, heads, group, dim, dtype
        self.terms = terms  # further fields of the calls
        self.model = ModelShape(layers, heads * group, heads, dim, config="that of the tests")
        self.states = StateStore(slots)
        self.cache = KVCache(layers, slots, config, state=self.states)
        self.draw = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw).to(self.dtype)

    def state(self, layer: int = 0) -> SequenceState:
        """What the method keeps of a layer."""
        (found,) = self.states.states((self.method,), layer)
        return found

    def read(self, slots: Sequence[int], counts: Sequence[int], **given: Tensor) -> list[LayerCall]:
        """Tokens of prompts. given: q [R, H, D] or k [R, G, D], the same in each layer."""
        observers = (self.method,) if self.method.observes_prompt else ()
        return [call for call, _ in self._pass(Segment("prefill", Dense(), observers), slots, counts, given)]

    def decode(self, slots: Sequence[int], **given: Tensor) -> list[tuple[LayerCall, Outcome]]:
        """One token each: (call, outcome) of each layer."""
        return self._pass(Segment("decode", self.method), slots, [1] * len(slots), given)

    def keep(self, layer: int, slot: int, count: int) -> Tensor:
        """Evict all but `count` keys of a sequence, others in each head: the slots kept, int64 [G, count]."""
        used = self.cache.slots_in_use(layer)[slot]
        orders = [torch.randperm(used, generator=self.draw) for _ in range(self.heads)]
        kept = torch.stack([order[:count].sort().values for order in orders])
        self.cache.keep(layer, [slot], [kept])
        return kept

    def _pass(
        self, segment: Segment, slots: Sequence[int], counts: Sequence[int], given: dict[str, Tensor]
    ) -> list[tuple[LayerCall, Outcome]]:
        step, rows = self.cache.begin(slots, counts), sum(counts)
        layers = runtime.Pass((segment,), self.model, self.states)

        def calls() -> Iterator[LayerCall]:
            for layer in range(self.model.layers):
                heads = {"q": self.heads * self.group, "k": self.heads, "v": self.heads}
                q, k, v = (given[x] if x in given else self.random(rows, n, self.dim) for x, n in heads.items())
                self.cache.append(layer, step, k, v)
                place = step.at(layer)
                yield layers.call(
                    layer, Rows(q, step.seq, place.slot, place.runs), self.cache.view(layer, step), step.slots,
                    self.dim**-0.5, shard=HeadShard.whole(self.heads), evicted=self.cache.evicted(layer), **self.terms,
                )  # fmt: skip

        try:
            done = runtime.drive(layers, calls())
        except BaseException:
            self.cache.abort(step)
            raise
        before = [self.cache.lengths[s] for s in slots]
        self.cache.commit(step)
        who = (segment.method, *segment.observers)
        self.states.mark_observed(who, slots, before, [self.cache.lengths[s] for s in slots])
        return done


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


def chosen_by(call: LayerCall, row: int, head: int) -> list[int]:
    """Entries of the list that a KV head attends to, as they stand there."""
    lists = call.meter.values[-1]
    assert isinstance(lists, Lists) and lists.per == "kv"
    head = min(head, lists.index.shape[1] - 1)
    return lists.index[row, head, : int(lists.count[row, head])].tolist()


def exact(call: LayerCall) -> Exact:
    """fp64 attention over what was attended to last."""
    return exact_attend(
        call.rows, call.kv, call.meter.values[-1],
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
    whole = call.shared[method]
    assert isinstance(whole, Lists)
    said: list[torch.Tensor] = []

    def half(head: int, total: Any) -> LayerCall:
        kv = replace(call.kv, k=call.kv.k[:, head : head + 1], v=call.kv.v[:, head : head + 1])
        rows = Rows(call.rows.q[:, group * head : group * (head + 1)], call.rows.seq, call.rows.pos)
        return replace(call.observer(), rows=rows, kv=kv, shard=HeadShard(head, 1, 2, total), shared={})

    for head in (0, 1):
        method.run(half(head, lambda x: said.append(x) or x), None)
    for head in (0, 1):
        again = half(head, lambda x, other=said[1 - head]: x + other)
        method.run(again, None)
        chosen = again.shared[method]
        for row in range(2):
            n = int(whole.count[row, 0])
            assert int(chosen.count[row, 0]) == n
            assert torch.equal(chosen.index[row, 0, :n], whole.index[row, 0, :n])
