"""Parts of a decode step's time with MAC and without: attention's parts measured alone, and the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from longreach.bench.case import Case
from longreach.bench.inputs import Inputs
from longreach.bench.mac.forced_hits import ForcedHits
from longreach.bench.timing import Call, measure
from longreach.methods.base import attend_densely

HOW = (
    "Each part of a layer's attention timed by itself (CUDA graph replay, cold L2), times the layers; rest: what that "
    "leaves of the step. Merging lies within attention, the ring is written by the match."
)
MATCH, ATTEND, APPEND, REST = "match and ring", "attention and merge", "append", "rest"


@torch.no_grad()
def phases(
    case: Case, device: torch.device, steps: dict[str, float], *, replays: int, seed: int
) -> dict[str, Any]:  # fmt: skip
    """steps: us of the whole step with "mac" and "dense" attention. Returns us of each part, and how it was taken."""
    model = case.model
    assert model is not None
    one = replace(case, model=None)
    inputs = Inputs(one, device, seed)
    planted = ForcedHits(inputs, one.reuse.hits[0], case.impls[0], seed)  # type: ignore[union-attr]

    def dense(copy: int) -> Call:
        return lambda: attend_densely(planted.calls[copy])

    makes = {MATCH: planted.match, ATTEND: planted.attention, APPEND: planted.append, "dense": dense}
    times = measure(
        {part: [make(copy) for copy in range(inputs.copies)] for part, make in makes.items()}, device, replays=replays
    )
    took = {part: timing.median * 1e6 * model.layers for part, timing in times.items()}
    parts = {
        "mac": {part: took[part] for part in (MATCH, ATTEND, APPEND)},
        "dense": {ATTEND: took["dense"], APPEND: took[APPEND]},
    }
    return {
        "how": HOW,
        "copies": inputs.copies,
        "microseconds": {who: {**mine, REST: steps[who] - sum(mine.values())} for who, mine in parts.items()},
    }
