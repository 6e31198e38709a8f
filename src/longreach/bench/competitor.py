"""Who is timed: a name, its settings, a call for each copy of the inputs, and where its output is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from longreach.bench.case import Memory
from longreach.bench.inputs import Inputs
from longreach.bench.timing import Call
from longreach.ops import attend


@dataclass(frozen=True)
class Competitor:
    """name: unique in its run; output: a call's result -> [B * rows, H, D]."""

    name: str
    who: str
    memory: Memory
    rows: int
    calls: Sequence[Call]
    output: Callable[[Any], Tensor]
    settings: dict[str, Any] = field(default_factory=dict)


def ours(inputs: Inputs, memory: Memory, rows: int, impl: str) -> Competitor:
    """attend on a memory layout."""

    def call(copy: int) -> Call:
        prepared = inputs.rows(copy, rows), inputs.view(copy, memory), inputs.selection(copy, rows)
        return partial(attend, *prepared, scale=inputs.scale, impl=impl)

    calls = [call(copy) for copy in range(inputs.copies)]
    name = impl if inputs.case.prefill else memory.label
    if rows != inputs.shape.rows:
        name = f"{rows} row{'s' if rows > 1 else ''}"
    return Competitor(name, "longreach", memory, rows, calls, lambda partial: partial.out, {"impl": impl})
