"""Error bars of attention over sampled keys against its true errors, over seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import CHUNK, Advance, Reader, attach
from longreach.cache import CacheConfig, SequenceState
from longreach.errors import InvalidInput, Unsupported
from longreach.evals.attention.weights import window_of
from longreach.evals.progress import Progress, unseen
from longreach.evals.sampling_study.panel import own_call, presets, state_of
from longreach.evals.sampling_study.study import SamplingStudy, rounded
from longreach.methods.base import AttentionMethod, Outcome
from longreach.methods.call import LayerCall, Phase
from longreach.methods.dense import Dense
from longreach.methods.magicpig import MagicPIG
from longreach.methods.oracle_sampling import OracleSampling
from longreach.tasks.base import Task

K = 0.05  # of oracle_sampling


def methods(centre: int) -> Iterator[tuple[str, AttentionMethod]]:
    """(label, method): magicpig's presets with both ways to share, and oracle_sampling with both ways to draw."""
    for trial in presets(centre, 0):
        if trial.weights and isinstance(trial.method, MagicPIG) and trial.method.centre == centre:
            yield trial.label, replace(trial.method, error_bars=True)
    yield f"oracle_sampling k={K}", OracleSampling(k=K, error_bars=True)
    yield f"oracle_sampling k={K} draw=systematic", OracleSampling(k=K, draw="systematic", error_bars=True)


class ErrorBarStudy(SamplingStudy):
    """As `SamplingStudy`, of error bars alone. seeds: draws of each method, by the seeds seed, seed + 1, and so on."""

    def __init__(
        self, model: Any, tokenizer: Any, tasks: Sequence[Task], *, length: int = 4096, samples: int = 1,
        rows: int = 4, seed: int = 0, centre: int | None = None, seeds: int = 2,
    ):  # fmt: skip
        if seeds < 1:
            raise InvalidInput(f"seeds: expected at least 1, got {seeds}")
        super().__init__(model, tokenizer, tasks, length=length, samples=samples, rows=rows, seed=seed, centre=centre,
                         ablations=False)  # fmt: skip
        self.seeds = range(seed, seed + seeds)

    def run(self, chunk: int = CHUNK, progress: Progress = unseen) -> dict[str, Any]:
        """{"samples", "results"} of a record. chunk: prompt tokens per pass.

        Results by label: {"method", "all", "tasks": {task: ...}}. "all", and each task: outputs, the number of query
        heads' outputs; error, the rms of |o - o_dense| / |o_dense|; bar, the rms of the standard errors over |o_dense|;
        ratio, error over bar; covered, the share of outputs with an error of at most two bars.
        Layers with a sliding window are left out. Raises Unsupported where all have one.
        """
        samples, probe = list[dict[str, Any]](), BarProbe(dict(methods(self.centre)), self.seeds)
        with attach(self.model, cache=CacheConfig(capacity=self.length)) as session:
            asked = [(task, one) for task, some in self.prompts.items() for one in some]
            reader, passes = Reader(session, chunk, graph=False), -(-self.rows // chunk) * len(asked)
            with progress("measuring", passes * self.shape.layers) as advance:
                for task, one in asked:
                    probe.begin(task, len(one.prompt) - self.rows, advance)
                    self._read(reader, one.prompt, probe)
                    samples.append({"task": task, **one.to_json()})
        if not probe.found:
            raise Unsupported("all layers of this model have a sliding window; there is nothing to sample")
        return {"samples": samples, "results": rounded(probe.results())}


class BarProbe:
    """A hook that runs methods on the rows of a prompt from position `begin(task, first, advance)` on."""

    def __init__(self, methods: dict[str, AttentionMethod], seeds: Sequence[int]):
        self.methods, self.seeds = methods, seeds
        # (label, task) -> errors and bars of outputs, over the length of dense attention's, fp64 [2, outputs] each
        self.found = defaultdict[tuple[str, str], list[Tensor]](list)
        self._task, self._first = "", 0
        self._advance: Advance = _unseen

    def begin(self, task: str, first: int, advance: Advance) -> None:
        """The next passes are over a prompt of this task. advance: by layers."""
        self._task, self._first, self._advance = task, first, advance

    def __call__(self, phase: Phase, call: LayerCall, outcome: Outcome) -> None:
        if int(call.rows.pos.min()) < self._first:
            return
        if window_of(call) is None:
            self._measure(call)
        self._advance(1)

    def _measure(self, call: LayerCall) -> None:
        dense = Dense().run(own_call(call, {}), None).partial.out
        size = torch.linalg.vector_norm(dense.double(), dim=-1)
        for seed in self.seeds:
            key: Hashable = None
            state: SequenceState | None = None  # both ways to share read the same tables, one after the other
            for label, method in self.methods.items():
                mine, one = own_call(call, {}), replace(method, seed=seed)  # type: ignore[call-arg]
                if _tables(one) != key:
                    key, state = _tables(one), state_of(one, mine)
                outcome = one.run(mine, state)
                assert outcome.relative_error is not None
                out = outcome.partial.out.double()
                bar = outcome.relative_error.double() * torch.linalg.vector_norm(out, dim=-1) / size
                error = torch.linalg.vector_norm(out - dense.double(), dim=-1) / size
                self.found[label, self._task].append(torch.stack([error.flatten(), bar.flatten()]).cpu())

    def results(self) -> dict[str, Any]:
        """See `ErrorBarStudy.run`."""
        tasks = list(dict.fromkeys(task for _, task in self.found))
        joined = {place: torch.cat(parts, 1) for place, parts in self.found.items()}
        return {
            label: {
                "method": method.to_json(),
                "all": calibration(torch.cat([joined[label, task] for task in tasks], 1)),
                "tasks": {task: calibration(joined[label, task]) for task in tasks},
            }
            for label, method in self.methods.items()
        }


def calibration(found: Tensor) -> dict[str, Any]:
    """How well bars fit errors, from both as fp64 [2, outputs]; see `ErrorBarStudy.run`."""
    error, bar = found
    rms = found.square().mean(1).sqrt().tolist()
    return {
        "outputs": len(error), "error": rms[0], "bar": rms[1], "ratio": rms[0] / max(rms[1], 1e-30),
        "covered": float((error <= 2 * bar).double().mean()),
    }  # fmt: skip


def _tables(method: AttentionMethod) -> Hashable:
    """Equal for methods with the same hash tables."""
    return replace(method, share="group") if isinstance(method, MagicPIG) else method


def _unseen(done: int) -> None:
    """Progress that is not shown."""
