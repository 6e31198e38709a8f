"""What methods share in choosing what a row attends to."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod, Outcome, attend_densely, budget, is_count, logits_bytes
from longreach.methods.call import LayerCall, ModelShape
from longreach.ops import Lists, Partial
from longreach.ops.types import Logits, require

OTHER_KEYS = "after eviction a slot holds other keys in each head and layer"


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


def max_keys(amount: int | float, capacity: int) -> int:
    """The largest of `base.budget` for lengths up to `capacity`."""
    return min(capacity, int(amount * capacity) + 1 if isinstance(amount, float) else amount)


def best_keys(call: LayerCall, scores: Tensor, k: int | float, *, last: int = 0) -> Lists:
    """The keys of each row with the highest scores, as many as the budget `k` means for its context. Ties: the older.

    scores: float [R, heads, N]; entries past a row's context may hold anything. last: this many newest keys are always
    among them.
    """
    heads = scores.shape[1]
    count = call.once(("budget", k, heads), lambda: budget(k, call.context)[:, None].repeat(1, heads))
    capacity = max_keys(k, call.kv.capacity)
    index, used = call.op("top_k", scores.float(), count, call.context, last=last, capacity=capacity)
    return Lists(index, used, all_visible=True)


def placed(layers: tuple[int, ...], of: int, count: int) -> tuple[int, ...]:
    """Where a model of `count` layers has these layers of a model of `of`: as deep in it, rounded down."""
    return tuple(sorted({layer * count // of for layer in layers}))


def gather_over_ranks(call: LayerCall, x: Tensor) -> Tensor:
    """x [R, N], computed from this rank's heads, of every rank: [R, ranks, N]."""
    shard = call.shard
    if shard is None or shard.count == shard.total:
        return x[:, None]
    found = x.new_zeros((x.shape[0], shard.total // shard.count, x.shape[1]))
    found[:, shard.first // shard.count] = x
    return shard.sum(found)


@dataclass(frozen=True)
class CrossLayerTopK(AttentionMethod):
    """Base of methods in which some layers choose keys, one set for all heads, that the layers after them attend to.

    Layers that choose attend densely, and so do those before the first of them.

    layers: those that choose; None: the paper's, as deep in the model at hand. paper: the paper's, and of how many.
    """

    layers: tuple[int, ...] | None = field(default=None, kw_only=True)

    paper: ClassVar[tuple[tuple[int, ...], int]]

    def __post_init__(self) -> None:
        if self.layers is not None:
            check_layers("layers", self.layers)
            require(len(self.layers) > 0, "layers: expected at least one layer that chooses, got none")

    def check(self, model: ModelShape) -> None:
        check_layers_of("layers", self.layers or (), model.layers)

    def choosing_layers(self, model: ModelShape) -> tuple[int, ...]:
        """The layers that choose, ascending."""
        return placed(*self.paper, model.layers) if self.layers is None else self.layers

    @abstractmethod
    def select_keys(self, call: LayerCall, whole: Partial, logits: Logits) -> Lists:
        """The keys of each row, lists of one head [R, 1, C], from dense attention of the layer and its logits."""

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        chosen = 4 * rows * (2 * capacity + 1)  # scores and a list, of at most all keys
        return logits_bytes(model, rows, capacity, dtype) + chosen

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if call.model is None:
            raise InvalidInput(f"LayerCall.model is required: the layers that choose for {self.name} depend on it")
        call.refuse_evicted(self.name, OTHER_KEYS)
        if call.layer in self.choosing_layers(call.model):
            whole, logits = call.op("attend_with_logits")
            call.shared[self] = self.select_keys(call, whole, logits)
            return Outcome(whole, "chooses for the layers after it")
        lists = call.shared.get(self)
        if lists is None:
            return attend_densely(call, "no layer before it has chosen")
        return Outcome(call.attend(lists))
