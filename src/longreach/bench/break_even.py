"""The context from which Kascade is faster than dense attention on a device, for the layers of a plan.

Both sides run in all layers of full attention of the plan's model, over random keys, values and queries of batch 1, and
are timed in turns (`timing.measure`). Only attention is timed: a layer's scores, choice and attention, or dense
attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longreach.bench.case import KASCADE_PREFILL, Case, Memory, Shape, Stack
from longreach.bench.inputs import WIDTHS, Inputs
from longreach.bench.timing import Call, measure
from longreach.cache import SequenceState
from longreach.methods.base import AttentionMethod
from longreach.methods.call import LayerCall, ModelShape, Phase
from longreach.methods.dense import Dense
from longreach.methods.kascade import Kascade
from longreach.methods.kascade.plan import KascadePlan
from longreach.plans import Plan

IMPL = "auto"  # as sessions attend
REPLAYS = 7


class Compared(NamedTuple):
    """Seconds of a layer, the mean over all layers, and the number of tokens in the cache or prompt."""

    context: int
    kascade: float
    dense: float

    @property
    def speed(self) -> float:
        """Of Kascade over dense attention."""
        return self.dense / self.kascade


def break_even(found: Sequence[Compared]) -> int:
    """The least context from which Kascade is faster at every longer one measured; one token more than the longest if
    it is slower there, as nothing is known of longer ones; 0 if it is faster at all. found: ascending contexts, one or
    more."""
    slow = [n for n, one in enumerate(found) if one.kascade >= one.dense]
    if not slow:
        return 0
    after = slow[-1] + 1
    return found[after].context if after < len(found) else found[-1].context + 1


@torch.no_grad()
def compare(plan: Plan, path: Path, phase: Phase, context: int, device: torch.device, seed: int = 0) -> Compared:
    """Time one decode step after `context` - 1 tokens, or a prompt of `context` tokens.

    path: the plan's file. Raises InvalidInput for a plan or shape that cannot be measured, and torch's error where the
    inputs do not fit the device.
    """
    model, layers = plan.model, KascadePlan.of(plan).layers
    shape = Shape(
        1, context, context if phase == "prefill" else 1, model.query_heads, model.kv_heads, model.head_dim,
        _dtype(plan, device),
    )  # fmt: skip
    group = KASCADE_PREFILL if phase == "prefill" else "kascade-decode"
    inputs = Inputs(Case(f"{phase} at {context}", group, shape, stack=Stack(layers=len(layers))), device, seed)
    whole = ModelShape(model.layers, model.query_heads, model.kv_heads, model.head_dim, model.config)
    ways: dict[str, AttentionMethod] = {"kascade": Kascade(plan=str(path), dense_below=0), "dense": Dense()}
    calls = {name: _calls(inputs, method, whole, layers, phase) for name, method in ways.items()}
    times = measure(calls, device, replays=REPLAYS if device.type == "cuda" else 3, warm_up=1, launches=False)
    return Compared(context, *(times[name].median / len(layers) for name in ways))


def _calls(
    inputs: Inputs, method: AttentionMethod, model: ModelShape, layers: Sequence[int], phase: Phase
) -> list[Call]:
    """A pass of all layers. Each layer of a decode step reads another copy of the inputs than the one before."""
    memory, slots = Memory(), torch.zeros(1, dtype=torch.int64, device=inputs.device)
    rows = inputs.rows(0, inputs.shape.rows)  # the layers of a pass share positions
    made = [
        partial(
            LayerCall, rows=replace(rows, q=inputs.q(copy, inputs.shape.rows)), kv=inputs.view(copy, memory),
            slots=slots, scale=inputs.scale, impl=IMPL, model=model, phase=phase,
        )
        for copy in range(inputs.copies)
    ]  # fmt: skip
    states = dict[int, SequenceState | None]()
    tables: dict[Any, Any] = {}  # of a prompt's tiles: made once, as their copies to the device cannot be captured

    def run() -> None:
        shared = tables if phase == "prefill" else {}
        for number, layer in enumerate(layers):
            call = made[0 if phase == "prefill" else number % len(made)](layer=layer, shared=shared)
            if layer not in states:
                states[layer] = method.new_state(call, 1)
            method.run(call, states[layer])

    return [run]


def _dtype(plan: Plan, device: torch.device) -> str:
    """The dtype in which the plan's model was calibrated on a GPU; on a CPU fp32."""
    named = str(plan.made.settings.get("dtype", "bfloat16"))
    return "float32" if device.type == "cpu" else named if named in WIDTHS else "bfloat16"
