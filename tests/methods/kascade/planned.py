"""Plans for the three layers of tests.methods.drive, and for other models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from longreach.methods.call import ModelShape
from longreach.plans import PlannedModel
from tests.methods.drive import KV_HEADS, LAYERS, MODEL
from tests.plans.factory import plan

SAME = tuple(range(KV_HEADS))
Rows = tuple[int, ...]


def planned(
    folder: Path,
    anchors: Rows = (0, 1),
    head_map: dict[int, Rows] | None = None,
    *,
    tile: int = 8,
    layers: Rows = tuple(range(LAYERS)),
    model: ModelShape = MODEL,
    dense_below: dict[str, int] | None = None,
) -> str:
    """Path of a plan. head_map: layer -> row of the map, where heads do not take their own lists.
    dense_below: of the CPU."""
    rows = [list((head_map or {}).get(n, range(model.kv_heads))) for n in range(model.layers)]
    values: dict[str, Any] = {"anchors": [*anchors], "head_map": rows, "layers": [*layers], "k": 4, "tile": tile}
    if dense_below is not None:
        values["dense_below"] = {"cpu": dense_below, "another device": {"decode": 1000, "prefill": 1000}}
    made = replace(plan("kascade", arrays={}), model=PlannedModel.of("a model", model), values=values)
    path = folder / f"plan-{abs(hash((anchors, str(rows), tile, layers, model.config, str(dense_below))))}.json"
    made.save(path)
    return str(path)
