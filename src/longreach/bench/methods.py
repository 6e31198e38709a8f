"""Decode methods for a model with random weights: with their default options, and plans made up for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from longreach.bench.case import Case
from longreach.bench.mac import decoding as mac
from longreach.bench.stack import NAME, planned
from longreach.methods.base import AttentionMethod, ModelShape
from longreach.methods.loki.plan import KIND, LokiPlan
from longreach.methods.registry import choose
from longreach.plans import Made, Plan, PlannedModel

FORCED = "mac"  # random queries match nothing, so its hits can be forced


@contextmanager
def method_for(
    name: str, case: Case, model: ModelShape, seed: int, *, forced_steps: int | None = None
) -> Iterator[AttentionMethod | None]:
    """A decode method by its name, None for dense; its plan is on disk within the block.

    Kascade's head map is random (`stack.planned`), Loki's directions are random and orthonormal. The cost of a step
    does not depend on these plans. forced_steps: steps that run with forced hits of MAC (`bench.mac.decoding.forced`);
    None: hits are not forced.
    """
    if name == "dense":
        yield None
    elif name == "kascade":
        with planned(case, seed, model) as (method, _, _):
            yield method
    elif name == "loki":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "loki.json"
            loki_plan(model, seed).save(path)
            yield choose("decode", name, plan=str(path))
    elif name == FORCED and forced_steps is not None:
        yield mac.forced(case, forced_steps)
    else:
        yield choose("decode", name)


def loki_plan(model: ModelShape, seed: int) -> Plan:
    """Random directions for each layer and KV head."""
    draw = torch.Generator().manual_seed(seed)
    dim = model.head_dim
    drawn = torch.empty(model.layers, model.kv_heads, dim, dim).normal_(generator=draw)
    basis = torch.linalg.qr(drawn).Q
    made = Made(data="none", sha256="", tokens=0, seed=seed, settings={}, longreach="", commit=None, torch="",
                transformers="", device="")  # fmt: skip
    arrays = LokiPlan(basis, torch.ones(basis.shape[:3])).arrays()
    return Plan(KIND, PlannedModel.of(NAME, model), {}, made, arrays)
