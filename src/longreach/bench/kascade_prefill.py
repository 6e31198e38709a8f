"""Run a case of Kascade's prefill: a prompt in all layers of a model in one captured sequence, beside dense attention.

A layer's scores, choice, head map and attention lie within what is timed; the tables of tiles, which a pass makes once
for all of its layers, do not. Time is that of a layer, the mean over all. Beside it stand the kinds of layers, and the
passes of an anchor: log-sums, scores, top-k with packing, attention. A stack that is not captured has only the kinds.

Queries of 128 neighbouring tokens share half of their variance, as a choice for a tile supposes; the rest is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longreach.bench.baselines import baseline
from longreach.bench.case import Case, Memory
from longreach.bench.check import WrongResult, bound, require_right
from longreach.bench.competitor import Competitor
from longreach.bench.inputs import Inputs, bytes_needed, flops_needed
from longreach.bench.stack import planned
from longreach.bench.sweep import best
from longreach.bench.targets import judge
from longreach.bench.timing import Call, Timing, measure
from longreach.cache import SequenceState
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.kascade import Kascade
from longreach.methods.kascade.plan import KascadePlan, tokens_of_tile
from longreach.methods.kascade.prefill import COLUMNS, PromptTiles, groups_of, scored_rows, scratch_for, tiles_of
from longreach.ops import Lists, TileLists
from longreach.records.launches import Launched

Say = Callable[[str], None]
ALIKE, SHARED = 128, 0.5  # tokens that share a part of their queries, and that part of the variance
LEAST_MASS = 0.999  # of exact scores: those near the last one chosen are equal but for rounding
KINDS = ("layer 0", "anchor", "reuse layer")


class PromptLayers:
    """Kascade over the prompt of a case, layer by layer, over copies of its inputs in turns."""

    def __init__(self, inputs: Inputs, memory: Memory, method: Kascade, model: ModelShape, plan: KascadePlan):
        self.inputs, self.method, self.model, self.plan = inputs, method, model, plan
        slots, impl = torch.arange(inputs.shape.batch, device=inputs.device), inputs.case.impls[0]
        for copy in range(inputs.copies):
            _correlate(inputs.q(copy, inputs.shape.rows), inputs.draw)
        self._calls = [
            partial(
                LayerCall, rows=inputs.rows(copy, inputs.shape.rows), kv=inputs.view(copy, memory), slots=slots,
                scale=inputs.scale, impl=impl, model=model, phase="prefill",
            )
            for copy in range(inputs.copies)
        ]  # fmt: skip
        # tables of tiles stay: a pass of a model makes them once, from what the host knows
        self._shared: list[dict[Any, Any]] = [{} for _ in range(inputs.copies)]
        self._states: dict[int, SequenceState | None] = {}

    def call(self, layer: int, copy: int) -> LayerCall:
        copy %= self.inputs.copies
        return self._calls[copy](layer=layer, shared=self._shared[copy])

    def run(self, layer: int, copy: int) -> tuple[LayerCall, Outcome]:
        call = self.call(layer, copy)
        if layer not in self._states:
            self._states[layer] = self.method.new_state(call, self.inputs.shape.batch)
        return call, self.method.run(call, self._states[layer])

    def all(self, copy: int) -> None:
        """All layers. Results of a layer are dropped before the next one runs, as a model drops them."""
        for layer in range(self.model.layers):
            self.run(layer, copy)

    def kinds(self) -> dict[str, tuple[int, int]]:
        """Kind of layer -> a layer of it, and its anchor."""
        anchors = self.plan.anchors
        reuse = next(n for n in self.plan.layers if n not in anchors and self.plan.anchor_of(n) != anchors[0])
        return dict(zip(KINDS, ((0, 0), (anchors[1],) * 2, (reuse, self.plan.anchor_of(reuse))), strict=True))

    def ready(self, layer: int, anchor: int, copy: int) -> Call:
        """One layer by itself, after its anchor has chosen for it."""
        self.run(anchor, copy)
        return lambda: self.run(layer, copy)

    def chosen(self, anchor: int, copy: int) -> tuple[LayerCall, TileLists]:
        """An anchor's call, and the lists that it leaves."""
        call, _ = self.run(anchor, copy)
        lists = call.shared[self.method].lists
        assert isinstance(lists, TileLists)
        return call, lists

    def passes(self, copy: int) -> dict[str, Call]:
        """The passes of an anchor that is not dense, each by itself."""
        method, layer = self.method, self.plan.anchors[1]
        call, lists = self.chosen(layer, copy)
        tiles = _tiles(call, method, self.plan)
        scored = scored_rows(call, tiles, method.score_every, method.lse_every)
        lse = call.op("tile_log_sums", scored.tiles, every=method.lse_every)
        heads = 1 if method.heads == "all" else call.kv.heads
        groups = groups_of(tiles.host, heads, call.kv.heads, scratch_for(lse))

        def columns(some: slice) -> int:
            return -(-int(tiles.host.start[some].max()) // COLUMNS) * COLUMNS

        def score() -> None:
            for some in groups:
                call.op("tile_scores", scored.tiles.take(some), lse, columns=columns(some))

        room = max((some.stop - some.start) * columns(some) for some in groups)
        scores = torch.rand(heads * room, device=self.inputs.device)
        index, offsets = torch.empty_like(lists.lists.index), lists.lists.offsets  # type: ignore[union-attr]

        def top_k() -> None:
            for some in groups:
                shape = some.stop - some.start, heads, columns(some)
                x = scores[: shape[0] * heads * shape[2]].view(shape)
                count = tiles.count[some][:, None].expand(-1, heads)
                capacity = int(tiles.host.keys[some].max())
                found, used = call.op("top_k", x, count, tiles.tiles.start[some], capacity=capacity)
                call.op("pack_lists", found, used, offsets[some.start * heads : some.stop * heads + 1], index)

        return {
            "log-sums": lambda: call.op("tile_log_sums", scored.tiles, every=method.lse_every),
            "scores": score,
            "top-k": top_k,
            "attend": lambda: call.attend(lists),
        }


@torch.no_grad()
def run_kascade_prefill(
    case: Case, device: torch.device, *, without: Iterable[str] = (), replays: int = 7, seed: int = 0,
    say: Say = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a case; the result as a record's part. Raises WrongResult, Unsupported and BaselineFailed as run_case."""
    stack = case.stack
    assert stack is not None
    names = [name for name in case.baselines if name not in set(without)]
    versions: dict[str, str] = {}
    for name in names:
        versions |= baseline(name).load()
    say(f"{case.name}: a prompt of {case.shape.context} tokens in {stack.layers} layers")
    inputs, memory = Inputs(case, device, seed), case.memories[0]
    with planned(case, seed) as (method, model, plan):
        assert isinstance(method, Kascade)
        layers = PromptLayers(inputs, memory, method, model, plan)
        checked = _checked(layers, memory)
        calls: dict[str, list[Call]] = {}
        if stack.captured:
            calls[stack.method] = [partial(layers.all, copy) for copy in range(inputs.copies)]
        for kind, (layer, anchor) in layers.kinds().items():
            calls[kind] = [layers.ready(layer, anchor, copy) for copy in range(inputs.copies)]
        if stack.captured:
            calls |= {f"anchor: {name}": [call] for name, call in layers.passes(0).items()}
        rivals, tried = list[Competitor](), dict[str, Any]()
        for name in names:
            found, tests = best(name, inputs, say)
            tried[name] = [asdict(test) for test in tests]
            rivals += found
        replays = min(replays, case.replays or replays)
        times = measure({**calls, **{c.name: c.calls for c in rivals}}, device, replays=replays, warm_up=1)
        if not stack.captured:
            times[stack.method] = _of_kinds(times, plan)
        checked = _checked(layers, memory)
        entries = [_ours(stack.method, times[stack.method], stack.layers, case, checked)]
        entries[0]["mass_of_chosen"] = checked["mass_of_chosen"]
        entries += [_ours(name, times[name], 1, case, checked) for name in calls if name != stack.method]
        described = {k: v for k, v in method.to_json().items() if k != "plan"}
        scored = "every row of a tile" if method.score_every == 1 else f"every {method.score_every}th row of a tile"
        scored += ", exact log-sums" if method.lse_every == 1 else f", log-sums from every {method.lse_every}th key"
    entries += [_theirs(c, times[c.name], case, inputs) for c in rivals]
    return {
        "shape": asdict(case.shape),
        "reads": asdict(case.reads),
        "stack": {**asdict(stack), "method": described, "head_map": [list(row) for row in plan.head_map]},
        "scored_by": scored,
        "queries": {"tokens": ALIKE, "shared_variance": SHARED},
        "flops_of_dense": flops_needed(case),
        "copies": inputs.copies,
        "seed": seed,
        **checked,
        "timing": {"how": times[stack.method].how, "replays": replays, "warm_up": 1},
        "baselines": {"versions": versions, "left_out": sorted(set(case.baselines) - set(names)), "tried": tried},
        "entries": entries,
        "targets": judge(case, entries),
    }


def _of_kinds(times: dict[str, Timing], plan: KascadePlan) -> Timing:
    """All layers of a plan, from one of each kind, in each round."""
    anchors = len(plan.anchors) - 1
    counts = dict(zip(KINDS, (1, anchors, len(plan.layers) - 1 - anchors), strict=True))
    rounds = zip(*([count * s for s in times[kind].seconds] for kind, count in counts.items()), strict=True)
    seen = [times[kind].launched for kind in KINDS]
    launched = None if None in seen else Launched(tuple(x for one in seen if one is not None for x in one.triton))
    return Timing.of([sum(each) for each in rounds], 1, f"{times[KINDS[0]].how}; kinds of layers by number", launched)


def _correlate(q: Tensor, draw: torch.Generator) -> None:
    """Neighbouring queries [R, H, D] share a part of their variance, in place."""
    for start in range(0, q.shape[0], ALIKE):
        part = q[start : start + ALIKE]
        common = torch.empty_like(part[:1]).normal_(generator=draw)
        part.mul_((1 - SHARED) ** 0.5).add_(common * SHARED**0.5)


def _tiles(call: LayerCall, method: Kascade, plan: KascadePlan) -> PromptTiles:
    tokens = tokens_of_tile(plan.tile, call.rows.q.shape[1] // call.kv.heads)
    found: PromptTiles = call.once((method, "tiles"), lambda: tiles_of(call.rows, tokens, method.budget))
    return found


def _checked(layers: PromptLayers, memory: Memory) -> dict[str, Any]:
    """The largest error of a reuse layer's rows over the keys of their lists, and the least mass of chosen keys."""
    mass, worst, exact = 1.0, 0.0, layers.method.score_every == layers.method.lse_every == 1
    reuse, anchor = layers.kinds()["reuse layer"]
    call, lists = layers.chosen(anchor, 0)
    for tile in _sampled_tiles(lists):
        for head in sorted({0, call.kv.heads - 1}):
            mass = min(mass, _mass(layers, memory, lists, tile, head))
    if exact and not mass >= LEAST_MASS:
        raise WrongResult(f"chosen keys hold {mass:.4f} of what the best hold; their time does not count")
    call, outcome = layers.run(reuse, 0)
    selection = call.meter.values[0]
    assert isinstance(selection, TileLists)
    for tile in _sampled_tiles(lists):
        for head in sorted({0, call.kv.heads - 1}):
            worst = max(worst, _error(layers, memory, selection, outcome, tile, head))
    if not worst <= bound(layers.inputs.dtype):
        raise WrongResult(f"relative error {worst:.2e} of a reuse layer is too large; its time does not count")
    return {"error": worst, "mass_of_chosen": mass}


def _sampled_tiles(lists: TileLists) -> list[int]:
    assert lists.tiles is not None
    count = lists.tiles.rows.shape[0]
    return sorted({count // 2, count - 1})


def _keys(layers: PromptLayers, memory: Memory, head: int) -> tuple[Tensor, Tensor]:
    """fp32 [N, D] of the first sequence's keys and values."""
    k, v = layers.inputs.kv(0, memory)
    return k[0, head].float(), v[0, head].float()


def _list_of(lists: TileLists, tile: int, head: int) -> Tensor:
    packed = lists.lists
    assert not isinstance(packed, Lists)
    entry = head if packed.head_map is None else int(packed.head_map[head])
    place = tile * packed.heads + (entry if packed.heads > 1 else 0)
    first, last = packed.offsets[place : place + 2].tolist()
    return packed.index[first:last].long()


def _logits(layers: PromptLayers, memory: Memory, lists: TileLists, tile: int, head: int) -> tuple[Tensor, Tensor]:
    """[rows, group, N] of a tile's rows, -inf past each row; and the rows' numbers."""
    assert lists.tiles is not None
    inputs = layers.inputs
    row = lists.tiles.rows[tile]
    row = row[row >= 0].long()
    group = inputs.shape.heads // inputs.shape.kv_heads
    q = inputs.q(0, inputs.shape.rows)[row, head * group : (head + 1) * group].float()
    k, _ = _keys(layers, memory, head)
    x = q @ k.T * inputs.scale
    return x.masked_fill(torch.arange(k.shape[0], device=x.device) > row[:, None, None], -torch.inf), row


def _mass(layers: PromptLayers, memory: Memory, lists: TileLists, tile: int, head: int) -> float:
    """Probability of the chosen keys of a tile and KV head, over that of the same number of best keys."""
    assert lists.tiles is not None
    x, _ = _logits(layers, memory, lists, tile, head)
    start, slots = int(lists.tiles.start[tile]), _list_of(lists, tile, head)
    if not bool((slots[1:] > slots[:-1]).all()):
        raise WrongResult(f"keys of tile {tile}, KV head {head} do not ascend; its time does not count")
    if not len(slots):
        return 1.0
    pooled = x.softmax(-1).sum((0, 1))[:start]
    return float(pooled[slots].sum() / pooled.topk(len(slots)).values.sum())


def _error(layers: PromptLayers, memory: Memory, lists: TileLists, outcome: Outcome, tile: int, head: int) -> float:
    """Relative error of a tile's rows over its list and its own keys."""
    assert lists.tiles is not None
    x, row = _logits(layers, memory, lists, tile, head)
    group = x.shape[1]
    taken = torch.arange(x.shape[2], device=x.device) >= int(lists.tiles.start[tile])
    taken[_list_of(lists, tile, head)] = True
    want = x.masked_fill(~taken, -torch.inf).softmax(-1) @ _keys(layers, memory, head)[1]
    got = outcome.partial.out[row, head * group : (head + 1) * group].float()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def _ours(name: str, timing: Timing, layers: int, case: Case, checked: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "who": "longreach",
        "settings": {"impl": case.impls[0], "layers": layers},
        **timing.recorded(layers),
        "tb_per_s": bytes_needed(case) * layers / timing.median / 1e12,
        "error": checked["error"],
    }  # fmt: skip


def _theirs(competitor: Competitor, timing: Timing, case: Case, inputs: Inputs) -> dict[str, Any]:
    out = competitor.output(competitor.calls[0]())
    return {
        "name": competitor.name,
        "who": competitor.who,
        "settings": {"memory": competitor.memory.label, **competitor.settings},
        **timing.recorded(),
        "tb_per_s": bytes_needed(case) / timing.median / 1e12,
        "tflop_per_s": flops_needed(case) / timing.median / 1e12,
        "error": require_right(competitor.name, inputs, competitor.memory, competitor.rows, out),
    }
