"""Measurements of each layer while the last rows of prompts pass through it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import Advance
from longreach.cache import SequenceState
from longreach.evals.attention.weights import window_of
from longreach.evals.sampling_study import estimators
from longreach.evals.sampling_study.angles import Angles
from longreach.evals.sampling_study.estimators import BUDGETS, DRAWS, SHARES, best_of_group, mass_of_best
from longreach.evals.sampling_study.exact import Exact
from longreach.evals.sampling_study.geometry import KeyGeometry, ranges
from longreach.evals.sampling_study.panel import GROUP, Trial, Tried, own_call, state_of, summary
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape, Phase
from longreach.methods.magicpig.schedule import Schedule
from longreach.ops import Selection, Spans

ESTIMATORS = ("top_k", "iid", "systematic")


class AngleProbe:
    """A hook that adds the angles of the rows from position `first` on."""

    def __init__(self, schedule: Schedule):
        self.angles, self.first = Angles(schedule), 0

    def __call__(self, phase: Phase, call: LayerCall, outcome: Outcome) -> None:
        before = int(call.rows.pos.min())
        if before >= self.first and window_of(call) is None:
            self.angles.add(call.rows.q, Exact.of(call), before, call.layer)


class FirstKeys:
    """A hook that keeps the key of the only row of each pass."""

    def __init__(self, geometry: KeyGeometry):
        self.geometry = geometry

    def __call__(self, phase: Phase, call: LayerCall, outcome: Outcome) -> None:
        if window_of(call) is None:
            self.geometry.other[call.layer].append(Exact.of(call).k[0].double())


class SamplingProbe:
    """A hook that measures the rows of a prompt from position `begin(first, end)` on.

    Passes over them must hold no other rows. Layers with a sliding window are left out. seed: of random draws.
    """

    def __init__(self, shape: ModelShape, trials: Sequence[Trial], seed: int, advance: Advance):
        self.shape, self.trials, self.advance = shape, trials, advance
        self.random = torch.Generator().manual_seed(seed)
        self.windows: list[int | None] = [None] * shape.layers
        self.geometry = KeyGeometry(shape.layers)
        self.masses: dict[str, list[list[Tensor]]] = _lists(("all", "without_first"), shape.layers)
        self.ranges: dict[str, list[list[Tensor]]] = _lists(("value_distance", "logits"), shape.layers)
        self.estimates: dict[str, list[list[Tensor]]] = _lists(ESTIMATORS, shape.layers)  # [R, H, budgets, 2]
        self.tried = {trial.label: Tried(shape.layers) for trial in trials}
        groups = [trial.label for trial in trials if trial.line == GROUP]
        self.same_keys, self.in_place = _lists(groups, shape.layers), _lists(groups, shape.layers)
        self._first = self._end = 0
        self._layer, self._shared = shape.layers, dict[Hashable, Any]()

    def begin(self, first: int, end: int) -> None:
        """The next passes are over rows [first, end) of a prompt."""
        self._first, self._end, self._layer = first, end, self.shape.layers

    def finish(self) -> None:
        """The passes are over."""
        for tried in self.tried.values():
            tried.ledger.commit()
        self._shared = {}

    def __call__(self, phase: Phase, call: LayerCall, outcome: Outcome) -> None:
        if int(call.rows.pos.min()) < self._first:
            return
        if call.layer <= self._layer:  # a pass begins
            self.finish()
        self._layer = call.layer
        self.windows[call.layer] = window_of(call)
        if self.windows[call.layer] is None:
            exact = Exact.of(call)
            self._measure(call.layer, exact)
            self._try(call, exact)
            if len(exact.k) == self._end:
                self.geometry.add(call.layer, exact.k, exact.v)
        self.advance(1)

    def _measure(self, layer: int, exact: Exact) -> None:
        for name, values in mass_of_best(exact.share, exact.context).items():
            self.masses[name][layer].append(values)
        for name, values in ranges(exact).items():
            self.ranges[name][layer].append(values.double())
        for name, found in (
            ("top_k", estimators.top_k(exact)),
            ("iid", estimators.iid(exact, self.random)),
            ("systematic", estimators.systematic(exact, self.random)),
        ):
            self.estimates[name][layer].append(torch.stack([torch.stack(pair, -1) for pair in found], 2))

    def _try(self, call: LayerCall, exact: Exact) -> None:
        states = dict[Hashable, SequenceState | None]()
        left = [trial.tables for trial in self.trials]
        for number, trial in enumerate(self.trials):
            mine = own_call(call, self._shared)
            if trial.tables not in states:
                states[trial.tables] = state_of(trial.method, mine)
            read = self.tried[trial.label].run(trial, mine, exact, states[trial.tables])
            if trial.tables not in left[number + 1 :]:
                del states[trial.tables]  # tables of all presets at a time take more memory than the model
            if trial.line == GROUP:
                self._compare(trial.label, mine, exact, read)

    def _compare(self, label: str, call: LayerCall, exact: Exact, read: list[Selection]) -> None:
        """Exact top-k at as many keys as MagicPIG reads, and with the best keys in place of those that it samples."""
        counts = [selection.keys_read(call.rows, call.kv) for selection in read]
        total = torch.stack(counts).sum(0)
        self.same_keys[label][call.layer].append(best_of_group(exact, total))
        always = torch.zeros_like(exact.pooled(), dtype=torch.bool)
        for selection, count in zip(read, counts, strict=True):
            if isinstance(selection, Spans):
                always |= selection.mask(call.rows, call.kv, always.shape[-1])
                total = total - count
        self.in_place[label][call.layer].append(best_of_group(exact, total, always))

    def results(self) -> dict[str, Any]:
        """See `SamplingStudy.run`."""
        count = self.shape.layers
        return {
            "windows": self.windows, "shares": list(SHARES),
            "mass": {name: _means(layers) for name, layers in self.masses.items()},
            "estimators": {
                "top_k": {"budgets": list(BUDGETS), **_estimates(self.estimates["top_k"])},
                "iid": {"budgets": list(DRAWS), **_estimates(self.estimates["iid"])},
                "systematic": {"budgets": list(BUDGETS), **_estimates(self.estimates["systematic"])},
            },
            "ranges": {name: _means(layers) for name, layers in self.ranges.items()},
            "geometry": self.geometry.results(),
            "methods": {trial.label: self.tried[trial.label].results(trial, count) for trial in self.trials},
            "top_k_same_keys": {label: summary(errors) for label, errors in self.same_keys.items()},
            "top_k_in_place": {label: summary(errors) for label, errors in self.in_place.items()},
        }  # fmt: skip


def _lists(names: Sequence[str], layers: int) -> dict[str, list[list[Tensor]]]:
    return {name: [[] for _ in range(layers)] for name in names}


def _means(layers: list[list[Tensor]]) -> list[Any]:
    """[layers][query heads], of [R, H, ...] of each pass; None for a layer that was not measured."""
    return [torch.cat(values).mean(0).tolist() if values else None for values in layers]


def _estimates(layers: list[list[Tensor]]) -> dict[str, Any]:
    """Of [R, H, budgets, 2], read and error. read: mean share of the context for each budget; errors: [layers][query
    heads][budgets]; mean, median: of errors, for each budget."""
    joined = [torch.cat(values) if values else None for values in layers]
    known = torch.cat([x.flatten(0, 1) for x in joined if x is not None])  # [rows of all, budgets, 2]
    return {
        "read": known[..., 0].mean(0).tolist(),
        "errors": [None if x is None else x[..., 1].mean(0).tolist() for x in joined],
        "mean": known[..., 1].mean(0).tolist(),
        "median": known[..., 1].median(0).values.tolist(),
    }
