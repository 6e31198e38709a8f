"""What methods share in choosing what a row attends to."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import (
    AttentionMethod,
    LayerCall,
    ModelShape,
    Outcome,
    Reads,
    attend_densely,
    is_count,
)
from longreach.ops import Lists, Partial, Spans
from longreach.ops.attend import attend_keeping
from longreach.ops.attend.keeping import keeping
from longreach.ops.types import Logits, require


def check_layers(name: str, layers: object) -> None:
    """Raise InvalidInput unless `layers` is a tuple of layer numbers, each once, ascending."""
    ok = isinstance(layers, tuple) and all(is_count(n) for n in layers) and list(layers) == sorted(set(layers))
    require(ok, f"{name}: expected a tuple of layer numbers, ascending, got {layers!r}")


def check_layers_of(name: str, layers: tuple[int, ...], count: int) -> None:
    """Raise InvalidInput where a layer is none of the model's `count`."""
    for layer in layers:
        require(
            layer < count,
            f"{name}: expected layers of the model, which has {count} (0 to {count - 1}), got layer {layer}",
        )


def most(amount: int | float, capacity: int) -> int:
    """The most keys that `base.budget` can ask for at any length up to `capacity`."""
    return min(capacity, int(amount * capacity) + 1 if isinstance(amount, float) else amount)


def best(scores: Tensor, count: Tensor, length: Tensor, *, capacity: int, last: int = 0) -> tuple[Tensor, Tensor]:
    """The `count` best of the first `length` entries of each row, in ascending order; ties go to the lower one.

    scores: finite float [R, heads, N]; count, length: int [R, heads] or [R, 1]; capacity: entries of the lists, at
    least the largest count. The `last` ones of each row come before all others. Entries at `length` and above may hold
    anything. No device sync.

    Returns (index int32 [R, heads, capacity], past the count anything; count int64 [R, heads]).
    """
    entry = torch.arange(scores.shape[2], device=scores.device)
    length, count = (x.long().expand(scores.shape[:2]) for x in (length, count))
    x = scores.masked_fill(entry >= (length - last)[..., None], torch.inf)
    x = x.masked_fill(entry >= length[..., None], -torch.inf)
    order = x.sort(dim=-1, descending=True, stable=True).indices[..., :capacity]
    used = count.minimum(length)
    spare = torch.arange(order.shape[2], device=order.device) >= used[..., None]
    return order.masked_fill(spare, scores.shape[2]).sort(dim=-1).values.int(), used


def placed(layers: tuple[int, ...], of: int, count: int) -> tuple[int, ...]:
    """Where a model of `count` layers has these layers of a model of `of`: as deep in it, rounded down.

    Layer 0 is left out: its attention is not sparse (Kascade, Fig. 1).
    """
    return tuple(sorted({min(max(1, layer * count // of), count - 1) for layer in layers}))


def keep_logits(call: LayerCall) -> tuple[Partial, Logits]:
    """Dense attention of a layer that reads keys and values once, and leaves the logits for a choice among the keys."""
    name = keeping.resolve(call.impl if call.impl in keeping.names() else "auto", call.rows.q.device)
    call.ran.add(name)
    return attend_keeping(
        call.rows, call.kv, scale=call.scale, softcap=call.softcap, sink_logit=call.sink_logit, impl=name
    )


def of_all_ranks(call: LayerCall, x: Tensor) -> Tensor:
    """x [R, N], found from the heads that are here: that of every rank, [R, ranks, N]."""
    shard = call.shard
    if shard is None or shard.count == shard.total:
        return x[:, None]
    found = x.new_zeros((x.shape[0], shard.total // shard.count, x.shape[1]))
    found[:, shard.first // shard.count] = x
    return shard.sum(found)


@dataclass(frozen=True)
class ChoosesForLater(AttentionMethod):
    """Base of methods in which some layers choose keys, one set for all heads, that the layers after them attend to.

    Layers that choose attend densely, and so do those before the first of them.
    """

    @abstractmethod
    def choosing_layers(self, model: ModelShape) -> tuple[int, ...]:
        """The layers that choose, ascending."""

    @abstractmethod
    def chosen(self, call: LayerCall, whole: Partial, logits: Logits) -> Lists:
        """The keys of each row, lists of one head [R, 1, C], from dense attention of the layer and its logits."""

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if call.model is None:
            raise InvalidInput(f"{self.name}: which layers choose depends on the model; expected a call that names it")
        if call.layer in self.choosing_layers(call.model):
            if call.kv.slot_pos is not None:
                raise Unsupported(f"{self.name}: after eviction a slot holds another key in each head")
            whole, logits = keep_logits(call)
            call.passed[self] = self.chosen(call, whole, logits)
            return Outcome(whole, Reads((EVERYTHING,), (EVERYTHING,)), "chooses for the layers after it")
        lists = call.passed.get(self)
        if lists is None:
            return attend_densely(call, "no layer before it has chosen")
        return Outcome(call.attend(lists), Reads((lists,), (lists,)))


EVERYTHING = Spans.dense()
