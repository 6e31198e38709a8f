"""Run a case of a method's layers: all layers of a model in one captured sequence, compared with dense attention.

Choosing keys, the map between heads and the lists lie within what is timed, and the lists come from the run itself.
Time is that of a layer, the mean over all. Beside it stand the kinds of layers, each by itself, and the passes that an
anchor makes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longreach.bench.anchor_breakdown import Timed, anchor_passes
from longreach.bench.baselines import baseline
from longreach.bench.case import Case, Memory
from longreach.bench.check import require_right
from longreach.bench.check_selection import LEAST_MASS, check_layer, check_selection
from longreach.bench.competitor import Competitor
from longreach.bench.inputs import Inputs, bytes_needed
from longreach.bench.sweep import best
from longreach.bench.targets import judge
from longreach.bench.timing import Call, Timing, measure
from longreach.cache import SequenceState
from longreach.methods.base import AttentionMethod, Outcome, PromptObserver
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.kascade import Kascade
from longreach.methods.kascade.plan import KascadePlan
from longreach.methods.kascade.state import KascadeState
from longreach.methods.registry import choose
from longreach.plans import Made, Plan, PlannedModel
from longreach.runtime import Ledger, Pass, Segment, drive

Say = Callable[[str], None]
Shared = dict[Any, Any]
Done = tuple[LayerCall, Outcome]
NAME = "that of the bench"
ANCHOR = "anchor"


class Layers:
    """A decode method in every layer of a case's stack, over copies of its inputs in turns."""

    def __init__(self, inputs: Inputs, memory: Memory, method: AttentionMethod, model: ModelShape, impl: str):
        self.inputs, self.method, self.model = inputs, method, model
        slots = torch.arange(inputs.shape.batch, device=inputs.device)
        self._calls = [
            partial(
                LayerCall, rows=inputs.rows(copy, 1), kv=inputs.view(copy, memory), slots=slots, scale=inputs.scale,
                impl=impl, model=model,
            )
            for copy in range(inputs.copies)
        ]  # fmt: skip
        self._states: dict[tuple[int, int], SequenceState | None] = {}

    def state(self, layer: int, copy: int) -> SequenceState | None:
        """A layer's state over a copy of the inputs: it may hold data of every key. Made at first use."""
        place = layer, copy % self.inputs.copies
        if place not in self._states:
            call = self.call(layer, copy, {})
            state = self._states[place] = self.method.new_state(call, self.inputs.shape.batch)
            if state is not None and self.method.observes_prompt:
                state.kept(layer, call.kv)  # of keys that no prompt brought
        return self._states[place]

    def call(self, layer: int, copy: int, shared: Shared) -> LayerCall:
        return self._calls[copy % self.inputs.copies](layer=layer, shared=shared)

    def run(self, layer: int, copy: int, shared: Shared) -> Done:
        call = self.call(layer, copy, shared)
        return call, self.method.run(call, self.state(layer, copy))

    def all(self, ledger: Ledger | None = None) -> list[Done]:
        """One pass over all layers, each over another copy than the one before."""
        step = Pass((Segment("decode", self.method),), self.model, self, ledger)
        return drive(step, (self.call(layer, layer, step.shared) for layer in range(self.model.layers)))

    def get(self, method: PromptObserver, call: LayerCall) -> SequenceState | None:
        """The state of a layer in `all`."""
        return self.state(call.layer, call.layer)

    def ready(self, layer: int, anchor: int, copy: int) -> Callable[[], Done]:
        """One layer by itself, after its anchor has chosen for it."""
        shared: Shared = {}
        if layer != anchor:
            self.run(anchor, copy, shared)
        self.state(layer, copy)
        return lambda: self.run(layer, copy, dict(shared))

    def passes(self, layer: int, copy: int) -> dict[str, Timed]:
        """The passes of an anchor that is not dense, measured alone."""
        assert isinstance(self.method, Kascade)
        state, (_, outcome) = self.state(layer, copy), self.run(layer, copy, {})
        assert isinstance(state, KascadeState)
        return anchor_passes(self.method, self.call(layer, copy, {}), state, outcome)


@torch.no_grad()
def run_stack(
    case: Case, device: torch.device, *, without: Iterable[str] = (), replays: int = 21, seed: int = 0,
    say: Say = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a case; the result as a record's part. Raises WrongResult, Unsupported and BaselineFailed as run_case."""
    stack = case.stack
    assert stack is not None
    names = [name for name in case.baselines if name not in set(without)]
    versions: dict[str, str] = {}
    for name in names:
        versions |= baseline(name).load()
    say(f"{case.name}: {case.shape.batch} x {case.shape.context} keys in {stack.layers} layers")
    inputs, impl = Inputs(case, device, seed), case.impls[0]
    with planned(case, seed) as (method, model, plan):
        layers = Layers(inputs, case.memories[0], method, model, impl)
        kinds = _kinds(plan)
        calls: dict[str, list[Call]] = {stack.method: [layers.all]}
        for kind, (layer, anchor) in kinds.items():
            calls[kind] = [layers.ready(layer, anchor, copy) for copy in range(inputs.copies)]
        checked = _checked(layers, plan, case.memories[0])
        passes = [layers.passes(plan.anchors[1], copy) for copy in range(inputs.copies)] if ANCHOR in kinds else []
        named = {name: f"{ANCHOR}: {name}" for one in passes[:1] for name in one}
        calls |= {title: [one[name].call for one in passes] for name, title in named.items()}
        rivals, tried = list[Competitor](), dict[str, Any]()
        for name in names:
            found, tests = best(name, inputs, say)
            tried[name] = [asdict(test) for test in tests]
            rivals += found
        times = measure({**calls, **{c.name: c.calls for c in rivals}}, device, replays=replays)
        checked = _checked(layers, plan, case.memories[0])
        read = _bytes_read(layers)
        entries = [_ours(stack.method, times[stack.method], stack.layers, read.values(), checked["error"], impl)]
        entries[0]["mass_of_chosen"] = checked["mass_of_chosen"]
        for kind, (layer, _) in kinds.items():
            entries.append(_ours(kind, times[kind], 1, [read[layer]], checked["error"], impl))
        for name, title in named.items():
            entries.append(_ours(title, times[title], 1, [passes[0][name].read], checked["error"], impl))
        described = {k: v for k, v in method.to_json().items() if k != "plan"}
    entries += [_theirs(c, times[c.name], bytes_needed(case), _error(c, inputs)) for c in rivals]
    return {
        "shape": asdict(case.shape),
        "reads": asdict(case.reads),
        "stack": {**asdict(stack), "method": described, "head_map": [list(row) for row in plan.head_map]},
        "bytes_needed": bytes_needed(case),
        "copies": inputs.copies,
        "seed": seed,
        **checked,
        "timing": {"how": times[stack.method].how, "replays": replays, "warm_up": 3},
        "baselines": {"versions": versions, "left_out": sorted(set(case.baselines) - set(names)), "tried": tried},
        "entries": entries,
        "targets": judge(case, entries),
    }


@contextmanager
def planned(
    case: Case, seed: int, model: ModelShape | None = None
) -> Iterator[tuple[AttentionMethod, ModelShape, KascadePlan]]:
    """The case's method with a plan for `model`, or one of its shape: heads are mapped at random, many to one."""
    stack, shape = case.stack, case.shape
    assert stack is not None
    draw = torch.Generator().manual_seed(seed)
    own = tuple(range(shape.kv_heads))
    mapped = [tuple(torch.randint(shape.kv_heads, (shape.kv_heads,), generator=draw).tolist())
              for _ in range(stack.layers)]  # fmt: skip
    head_map = tuple(own if n in stack.anchors else mapped[n] for n in range(stack.layers))
    plan = KascadePlan(stack.anchors, head_map, tuple(range(stack.layers)), k=64, tile=128)
    model = model or ModelShape(stack.layers, shape.heads, shape.kv_heads, shape.dim, NAME)
    of = PlannedModel(NAME, model.config, model.layers, model.query_heads, model.kv_heads, model.head_dim)
    made = Made(data="none", sha256="", tokens=0, seed=seed, settings={}, longreach="", commit=None, torch="",
                transformers="", device="")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        Plan("kascade", of, plan.values(), made, {}).save(path)
        method = choose("decode", stack.method, plan=str(path), **dict(stack.options))
        method.check(model)
        yield method, model, plan


def _kinds(plan: KascadePlan) -> dict[str, tuple[int, int]]:
    """Kind of layer -> a layer of it, and its anchor."""
    reuse = next(n for n in plan.layers if n not in plan.anchors)
    found = {"layer 0": (plan.anchors[0], plan.anchors[0]), "reuse layer": (reuse, plan.anchor_of(reuse))}
    if len(plan.anchors) > 1:
        found[ANCHOR] = (plan.anchors[1], plan.anchors[1])
    return found


def _checked(layers: Layers, plan: KascadePlan, memory: Memory) -> dict[str, Any]:
    """For each kind of layer: the error of its output over the keys it attended to, and its chosen keys' weight."""
    done, worst, mass, method = layers.all(), 0.0, 1.0, layers.method
    assert isinstance(method, Kascade)
    mass_of = partial(check_selection, least=LEAST_MASS[method.scoring], sinks=method.sinks, recent=method.recent)
    for kind, (layer, _) in _kinds(plan).items():
        worst = max(worst, check_layer(kind, layers.inputs, memory, layer % layers.inputs.copies, *done[layer]))
    for anchor in plan.anchors:
        user = next((n for n in plan.layers if n > anchor and plan.anchor_of(n) == anchor), None)
        if user is not None:
            lists = done[user][0].meter.keys[0]
            mass = min(mass, mass_of(layers.inputs, memory, anchor % layers.inputs.copies, lists))
    return {"error": worst, "mass_of_chosen": mass}


def _bytes_read(layers: Layers) -> dict[int, int]:
    """Bytes that each layer reads, as the method's report counts them."""
    ledger = Ledger()
    layers.all(ledger)
    return {report.layer: report.bytes_read for report in ledger.report().layers}


def _error(competitor: Competitor, inputs: Inputs) -> float:
    out = competitor.output(competitor.calls[0]())
    return require_right(competitor.name, inputs, competitor.memory, competitor.rows, out)


def _ours(name: str, timing: Timing, layers: int, read: Iterable[int], error: float, impl: str) -> dict[str, Any]:
    bytes_a_layer = sum(read) / layers
    return {
        "name": name,
        "who": "longreach",
        "settings": {"impl": impl, "layers": layers, "bytes_read_a_layer": bytes_a_layer},
        **timing.recorded(layers),
        "tb_per_s": bytes_a_layer * layers / timing.median / 1e12,
        "error": error,
    }  # fmt: skip


def _theirs(competitor: Competitor, timing: Timing, needed: int, error: float) -> dict[str, Any]:
    return {
        "name": competitor.name,
        "who": competitor.who,
        "settings": {"memory": competitor.memory.label, **competitor.settings},
        **timing.recorded(),
        "tb_per_s": needed / timing.median / 1e12,
        "error": error,
    }
