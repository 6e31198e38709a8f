"""MagicPIG's view of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.methods.base import is_count
from longreach.methods.magicpig.allocate import cheapest
from longreach.methods.magicpig.schedule import MOST_TOKENS
from longreach.methods.magicpig.state import SEGMENT
from longreach.ops.simhash.api import Share
from longreach.ops.simhash.probability import MOST_BITS, MOST_LEAST, MOST_TABLES
from longreach.ops.types import describe, require
from longreach.plans import Plan

KIND = "magicpig"
DENSE = (0, 0)  # the pair of a layer without tables
HELP = "take another plan, or calibrate again (longreach calibrate magicpig)"
ARRAYS = ("error", "sampled", "sampled_heads", "looked_up")
Pair = tuple[int, int]  # bits, tables


@dataclass(frozen=True)
class Options:
    """Options of the method that its errors and reads depend on; those of a method must be those of its plan."""

    seed: int
    least: int
    share: Share
    sinks: int
    local: int
    seal: int
    centre: int

    def __post_init__(self) -> None:
        for name, least, most in (("seed", 0, (1 << 32) - 1), ("least", 1, MOST_LEAST), ("sinks", 0, MOST_TOKENS),
                                  ("local", 1, MOST_TOKENS), ("seal", 1, MOST_TOKENS),
                                  ("centre", 0, MOST_TOKENS)):  # fmt: skip
            value = getattr(self, name)
            ok = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
            require(ok, f"{name}: expected an int in [{least}, {most}], got {value!r}; {HELP}")
        require(self.share in ("own", "group"), f"share: expected 'own' or 'group', got {self.share!r}; {HELP}")


@dataclass(frozen=True, eq=False)
class MagicPIGPlan:
    """Errors and reads to expect of pairs of bits and tables, and the pair chosen for each layer.

    chosen: a pair for each layer, one of `pairs` or DENSE. pairs: those measured, P of them. layers: those of full
    attention; the others attend densely. budget: bytes over dense attention's, of the layers of full attention
    together, for which the pairs were chosen. memory: the limit on the memory of the tables over that of keys and
    values; None for none. length: tokens of the context that budgets are for. element: bytes of a number in the cache.
    heads: (query heads, KV heads, channels of a head).
    error: float [L, G, P], expected error of the output over its norm. sampled: float [L, G, P], the share of the keys
    in the tables that any query head of a KV head samples; sampled_heads: the sum of the shares of its query heads;
    looked_up: ids in buckets that they read, for each key in the tables. Zeros in layers that are not of full
    attention.
    Raises InvalidInput where these do not fit each other.
    """

    chosen: tuple[Pair, ...]
    pairs: tuple[Pair, ...]
    layers: tuple[int, ...]
    options: Options
    budget: float
    memory: float | None
    length: int
    element: int
    heads: tuple[int, int, int]
    error: Tensor
    sampled: Tensor
    sampled_heads: Tensor
    looked_up: Tensor

    def __post_init__(self) -> None:
        require(len(self.pairs) > 0, f"pairs: expected at least one, got none; {HELP}")
        for pair in self.pairs:
            require(self._possible(pair), f"pairs: expected [bits, tables] within the limits, got {pair!r}; {HELP}")
        require(len(set(self.pairs)) == len(self.pairs), f"pairs: expected each once, got {self.pairs}; {HELP}")
        query, kv, _ = self.heads
        shape = [len(self.chosen), kv, len(self.pairs)]
        for name in ARRAYS:
            x = getattr(self, name)
            ok = isinstance(x, Tensor) and x.is_floating_point() and list(x.shape) == shape
            require(ok, f"{name}: expected float {shape}, got {describe(x)}; {HELP}")
            most = {"sampled": 1.0, "sampled_heads": query / kv}.get(name, float("inf"))
            low, high = (float(x.min()), float(x.max())) if x.numel() else (0.0, 0.0)
            ok = low >= 0 and high <= most * 1.00001
            require(ok, f"{name}: expected numbers in [0, {most}], got {low:.6g} to {high:.6g}; {HELP}")
        ok = all(is_count(n) and n < shape[0] for n in self.layers) and list(self.layers) == sorted(set(self.layers))
        require(ok, f"layers: expected ascending layers from 0 to {shape[0] - 1}, got {list(self.layers)}; {HELP}")
        for n, pair in enumerate(self.chosen):
            ok = pair == DENSE or (pair in self.pairs and n in self.layers)
            require(ok, f"bits, tables: expected one of the pairs or 0, 0 in layer {n}, got {pair}; {HELP}")
        ok = _positive(self.budget) and self.budget <= 1
        require(ok, f"budget: expected a share of dense attention's bytes in (0, 1], got {self.budget!r}; {HELP}")
        ok = self.memory is None or _positive(self.memory)
        require(ok, f"memory: expected a share > 0 of keys and values, or null, got {self.memory!r}; {HELP}")
        for name in ("length", "element"):
            value = getattr(self, name)
            require(is_count(value, 1), f"{name}: expected a count >= 1, got {value!r}; {HELP}")

    def _possible(self, pair: object) -> bool:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            return False
        bits, tables = pair
        return (
            is_count(bits, 1) and bits <= MOST_BITS and is_count(tables, self.options.least) and tables <= MOST_TABLES
        )

    @classmethod
    def of(cls, plan: Plan) -> MagicPIGPlan:
        """The view of a plan of kind "magicpig". Raises InvalidInput, naming what is missing or wrong."""
        require(plan.kind == KIND, f"expected a plan for {KIND}, got one for {plan.kind}; give the right file")
        values, model = plan.values, plan.model
        for name in VALUES:
            require(name in values, f"the plan lacks the value {name!r}; {HELP}")
        for name in ARRAYS:
            require(name in plan.arrays, f"the plan lacks the array {name!r}; {HELP}")
        for name in ("bits", "tables", "pairs", "layers"):
            require(isinstance(values[name], list), f"{name}: expected a list, got {values[name]!r}; {HELP}")
        for name in ("bits", "tables"):
            fits = len(values[name]) == model.layers
            require(
                fits,
                f"{name}: expected one for each of {model.layers} layers, got {len(values[name])}; {HELP}",
            )
        return cls(
            chosen=tuple(zip(values["bits"], values["tables"], strict=True)),
            pairs=tuple(tuple(pair) if isinstance(pair, list) else pair for pair in values["pairs"]),
            layers=tuple(values["layers"]),
            options=Options(**{f.name: values[f.name] for f in fields(Options)}),
            budget=values["budget"],
            memory=values["memory"],
            length=values["length"],
            element=values["element"],
            heads=(model.query_heads, model.kv_heads, model.head_dim),
            **{name: plan.arrays[name] for name in ARRAYS},
        )

    def values(self) -> dict[str, Any]:
        """As a plan's values hold it; `of` reads it back."""
        bits, tables = zip(*self.chosen, strict=True)
        return {
            "bits": list(bits), "tables": list(tables), **asdict(self.options), "budget": self.budget,
            "memory": self.memory, "length": self.length, "element": self.element, "layers": list(self.layers),
            "pairs": [list(pair) for pair in self.pairs],
        }  # fmt: skip

    def arrays(self) -> dict[str, Tensor]:
        """As a plan's arrays hold it."""
        return {name: getattr(self, name).float() for name in ARRAYS}

    @cached_property
    def layer_error(self) -> Tensor:
        """fp64 [L, P]: the mean error over KV heads."""
        return self.error.double().mean(1)

    def reads(self, element: int | None = None) -> tuple[Tensor, Tensor]:
        """Bytes over dense attention's of a decode step after `length` tokens: two fp64 [L, P], search and attention.

        Search: projections, look-ups, keys that are read for their weights, and each step's share of a block that
        enters the tables. Attention: lists with their weights, and keys and values. element: bytes of a number in the
        cache, of calibration if None.
        """
        query, kv, dim = self.heads
        element, options = element or self.element, self.options
        exact = min(self.length, options.sinks + options.local + (options.seal + 1) / 2)  # mean over a block's steps
        inside = self.length - exact
        segments = -(-(self.length - options.local) // SEGMENT)
        bits, tables = torch.tensor(self.pairs, dtype=torch.float64).T
        key = dim * element
        union = self.sampled.double().sum(1) * inside
        heads = self.sampled_heads.double().sum(1) * inside
        entries = union if options.share == "group" else heads
        directions = 2.0 * bits * tables * dim
        sealing = kv * key + (directions + 2 * kv * tables * (inside % SEGMENT)) / options.seal
        look_ups = 2 * 2 * segments * query * tables + 2 * self.looked_up.double().sum(1) * inside
        search = directions + look_ups + union * key + 4 * entries + 4 * kv * dim + sealing
        attention = 2 * key * (kv * exact + union) + 8 * entries
        dense = 2 * key * kv * self.length
        return search / dense, attention / dense

    def table_memory(self, element: int | None = None) -> Tensor:
        """fp64 [P]: memory of a layer's tables after `length` tokens, over that of its keys and values."""
        _, _, dim = self.heads
        bits, tables = torch.tensor(self.pairs, dtype=torch.float64).T
        segments = -(-self.length // SEGMENT)
        one = 2 * tables * (self.length + segments * (2**bits + 1)) + 4 * self.length  # and keys' inverse norms
        return one / (2 * self.length * dim * (element or self.element))

    def choose(self, budget: float, memory: float | None = None, element: int | None = None) -> tuple[Pair, ...]:
        """The pair of each layer, DENSE where it attends densely, with the least error within budget and memory.

        It minimises the sum over layers of the squared mean error. budget, memory: as the fields.
        Raises InvalidInput if no choice fits.
        """
        layers, count = list(self.layers), len(self.pairs)
        search, attention = self.reads(element)
        costs, errors = (x[layers] for x in (search + attention, self.layer_error.square()))
        # the last choice of each layer is dense attention
        costs = torch.cat([costs, torch.ones(len(layers), 1, dtype=torch.float64)], 1)
        errors = torch.cat([errors, torch.zeros(len(layers), 1, dtype=torch.float64)], 1)
        room = torch.cat([self.table_memory(element), torch.zeros(1, dtype=torch.float64)]).expand_as(costs)
        total = budget * len(layers)
        limit = None if memory is None else memory * len(layers)
        places = cheapest(costs, errors, room, total, limit)
        if places is None:
            least, within = float(costs.amin(1).sum()) / len(layers), ""
            if memory is not None:
                within = f", with tables of at most {memory:g} of the memory of keys and values"
            raise InvalidInput(
                f"budget: no choice of the plan's pairs reads at most {budget:g} of dense attention's bytes after "
                f"{self.length} tokens{within}; the fewest, with any memory, are {least:.3g}; raise the budget, or use "
                f"longer contexts"
            )
        found = dict(zip(layers, places, strict=True))
        return tuple(self.pairs[found[n]] if found.get(n, count) < count else DENSE for n in range(len(self.chosen)))

    def expected(self, chosen: tuple[Pair, ...], element: int | None = None) -> Mapping[str, list[float]]:
        """Of these pairs, layer by layer: {"error", "search", "attention", "memory"}; dense layers read 1."""
        search, attention = self.reads(element)
        memory = self.table_memory(element)
        found: dict[str, list[float]] = {"error": [], "search": [], "attention": [], "memory": []}
        for n, pair in enumerate(chosen):
            at = self.pairs.index(pair) if pair != DENSE else None
            found["error"].append(0.0 if at is None else float(self.layer_error[n, at]))
            found["search"].append(0.0 if at is None else float(search[n, at]))
            found["attention"].append(1.0 if at is None else float(attention[n, at]))
            found["memory"].append(0.0 if at is None else float(memory[at]))
        return found


VALUES = ("bits", "tables", *(f.name for f in fields(Options)), "budget", "memory", "length", "element", "layers",
          "pairs")  # fmt: skip


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


@lru_cache(maxsize=32)
def view(plan: Plan) -> MagicPIGPlan:
    """`MagicPIGPlan.of`, once for each plan that is loaded."""
    return MagicPIGPlan.of(plan)


@lru_cache(maxsize=32)
def chosen_for(plan: MagicPIGPlan, budget: float | None, element: int) -> tuple[Pair, ...]:
    """The pair of each layer: the plan's own, or chosen for a budget within the plan's memory."""
    return plan.chosen if budget is None else plan.choose(budget, plan.memory, element)
