"""Shared by methods that choose keys: budgets, top-k, and lists that later layers reuse."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod, Outcome, attend_densely, budget, is_count, logits_bytes
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.error_bars import SampledLists
from longreach.ops import Lists, Partial, uniforms
from longreach.ops.doors import EVERYTHING, Read
from longreach.ops.sample.splitting import workspace_bytes
from longreach.ops.types import Logits, require

Choose = Literal["top", "sample"]
OTHER_KEYS = "after eviction a slot holds other keys in each head and layer"


def check_layers(name: str, layers: object) -> None:
    """Raise InvalidInput unless `layers` is a tuple of layer numbers, each once, ascending."""
    ok = isinstance(layers, tuple) and all(is_count(n) for n in layers) and list(layers) == sorted(set(layers))
    require(ok, f"{name}: expected a tuple of layer numbers, ascending, got {layers!r}")


def check_layers_of(name: str, layers: tuple[int, ...], count: int) -> None:
    """Raise InvalidInput for a layer number that a model of `count` layers does not have."""
    for layer in layers:
        require(
            layer < count,
            f"{name}: expected layers of the model, which has {count} (0 to {count - 1}), got layer {layer}",
        )


def max_keys(amount: int | float, capacity: int) -> int:
    """The largest of `base.budget` for lengths up to `capacity`."""
    return min(capacity, int(amount * capacity) + 1 if isinstance(amount, float) else amount)


def check_choice(choose: object, seed: object) -> None:
    """Raise InvalidInput unless `choose` is "top" or "sample" and `seed` a count, 0 for "top"."""
    require(choose in ("top", "sample"), f"choose: expected 'top' or 'sample', got {choose!r}")
    require(is_count(seed), f"seed: expected a count, got {seed!r}")
    require(choose == "sample" or seed == 0, f"seed: expected choose='sample', as top-k draws nothing, got {seed}")


def keys_for_budget(
    call: LayerCall, scores: Tensor, k: int | float, *, last: int = 0, choose: Choose = "top", seed: int = 0,
    one_set: bool = False,
) -> Lists:  # fmt: skip
    """Keys of each row, as many as budget `k` gives for its context; see `chosen_keys`."""
    heads = scores.shape[1]
    count = call.once(("budget", k, heads), lambda: budget(k, call.context)[:, None].repeat(1, heads))
    capacity = max_keys(k, call.kv.capacity)
    return chosen_keys(
        call, scores.float(), count, last=last, capacity=capacity, choose=choose, seed=seed, one_set=one_set
    )


def chosen_keys(
    call: LayerCall, scores: Tensor, count: Tensor, *, capacity: int, first: int = 0, last: int = 0,
    choose: Choose = "top", seed: int = 0, power: float = 1.0, one_set: bool = False,
) -> Lists:  # fmt: skip
    """`count` [R, heads] keys of each row by scores fp32 [R, heads, N]; what lies past a row's context may be anything.

    choose: "top", those with the largest scores, ties to the older one; "sample", drawn by their scores to `power` and
    weighted, so that softmax's sums over them are unbiased (`ops.sample`), by random numbers that follow from the seed,
    the layer, the row's position and the KV head; then the lists are SampledLists.
    first, last: oldest and newest keys that are always chosen.
    one_set: whether there is one list for all heads of all ranks, so that all ranks must draw the same one.
    """
    if choose == "top":
        index, used = call.op("top_k", scores, count, call.context, first=first, last=last, capacity=capacity)
        return Lists(index, used, all_visible=True)
    before = 0 if call.shard is None or one_set else call.shard.first
    offset = _offsets(call, seed, before, scores.shape[1])
    index, used, weight, factor = call.op(
        "sample", scores, count, call.context, offset, first=first, last=last, power=power, capacity=capacity
    )
    return SampledLists(index, used, weight, all_visible=True, factor=factor)


def _offsets(call: LayerCall, seed: int, first: int, count: int) -> Tensor:
    """fp64 [R, count]: random numbers of the layer's rows and of heads [first, first + count).

    Those of all layers are computed at the first one: some 40 small kernels on a GPU, however many layers there are.
    """
    pos = call.rows.pos

    def drawn(layer: int | Tensor) -> Tensor:
        return uniforms(seed, layer, pos, torch.arange(first, first + count, device=pos.device))

    if call.model is None:
        return drawn(call.layer)
    layers = call.model.layers
    key = ("uniforms", seed, first, count)
    return call.once(key, lambda: drawn(torch.arange(layers, device=pos.device)))[call.layer]


def exact_scores(call: LayerCall) -> Tensor:
    """fp32 [R, G, N]: softmax probabilities of all keys, summed over the query heads of a KV head.

    Two passes over the keys are counted, also where kept logits spare the second.
    """
    lse = None if call.sink_logit is None else call.attend(EVERYTHING).lse
    if call.computes("score_keys", "reference"):
        found: Tensor = call.op("pooled_scores", lse=lse)
        return found
    own, logits = call.op("score_keys")
    if lse is None:
        call.count_read(Read.of(call.kv, EVERYTHING, values=False))
    found = call.op("pooled_scores", lse=own if lse is None else lse, logits=logits)
    return found


def sampling_bytes(choose: Choose, model: ModelShape, rows: int, heads: int, capacity: int, chosen: int) -> int:
    """Memory that drawing up to `chosen` keys takes in addition to choosing the best.

    It holds weights, factors, the kernels' scratch and all layers' random numbers.
    """
    if choose == "top":
        return 0
    return 8 * rows * heads * (chosen + model.layers) + workspace_bytes(rows * heads, capacity)


def placed(layers: tuple[int, ...], of: int, count: int) -> tuple[int, ...]:
    """Layers of a model of `of` layers, at the same relative depth of a model of `count` layers, rounded down."""
    return tuple(sorted({layer * count // of for layer in layers}))


def gather_over_ranks(call: LayerCall, x: Tensor) -> Tensor:
    """x [R, N], computed from each rank's heads, gathered from all ranks: [R, ranks, N]."""
    shard = call.shard
    if shard is None or shard.count == shard.total:
        return x[:, None]
    found = x.new_zeros((x.shape[0], shard.total // shard.count, x.shape[1]))
    found[:, shard.first // shard.count] = x
    return shard.sum(found)


@dataclass(frozen=True)
class CrossLayerTopK(AttentionMethod):
    """Base of methods with one set of keys for all heads: a few layers choose it, later layers attend to it.

    Choosing layers attend densely, as do layers before the first of them.

    layers: the choosing layers; None: the paper's, at the same relative depth. paper: (the paper's layers, their
    model's number of layers).
    """

    layers: tuple[int, ...] | None = field(default=None, kw_only=True)

    paper: ClassVar[tuple[tuple[int, ...], int]]

    def __post_init__(self) -> None:
        if self.layers is not None:
            check_layers("layers", self.layers)
            require(len(self.layers) > 0, "layers: expected at least one layer that chooses keys, got none")

    def check(self, model: ModelShape) -> None:
        check_layers_of("layers", self.layers or (), model.layers)

    def choosing_layers(self, model: ModelShape) -> tuple[int, ...]:
        """The choosing layers, ascending."""
        return placed(*self.paper, model.layers) if self.layers is None else self.layers

    @abstractmethod
    def select_keys(self, call: LayerCall, whole: Partial, logits: Logits) -> Lists:
        """The keys of each row, lists of one head [R, 1, C], from dense attention of the layer and its logits."""

    def eviction_refusal(self) -> str:
        return OTHER_KEYS

    def whole_layers(self, model: ModelShape, dtype: torch.dtype) -> Collection[int]:
        choosing = self.choosing_layers(model)
        return {*range(choosing[0]), *choosing}

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        chosen = 4 * rows * (2 * capacity + 1)  # scores and a list, of at most all keys
        return logits_bytes(model, rows, capacity, dtype) + chosen

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if call.model is None:
            raise InvalidInput(f"LayerCall.model is required: the layers that choose for {self.name} depend on it")
        call.refuse_evicted(self)
        if call.layer in self.choosing_layers(call.model):
            whole, logits = call.op("attend_with_logits")
            call.shared[self] = self.select_keys(call, whole, logits)
            return Outcome(whole, "chooses for the layers after it")
        lists = call.shared.get(self)
        if lists is None:
            return attend_densely(call, "no layer before it has chosen")
        return Outcome(call.attend(lists))
