"""Measure cases of any kind in one run, which makes a model or tries a baseline's settings once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from longreach.bench.case import EVICT, FIRST_TOKEN, FUSION, HOST, STEPS, USER, Case
from longreach.bench.decoding import Decoding
from longreach.bench.evict import run_evict
from longreach.bench.first_token import run_first_token
from longreach.bench.fusion import run_fusion
from longreach.bench.host.run import run_host
from longreach.bench.method_steps import run_method_steps
from longreach.bench.mka.cases import MODEL
from longreach.bench.mka.model import run_mka_model
from longreach.bench.run import QUICK, REPLAYS, run_case
from longreach.bench.sweep import Sweeps
from longreach.bench.user import run_user

Say = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]
MANY = {
    STEPS: run_method_steps,
    USER: run_user,
    EVICT: run_evict,
    FUSION: run_fusion,
    FIRST_TOKEN: run_first_token,
    HOST: run_host,
    MODEL: run_mka_model,
}  # groups whose cases measure many methods with one model


class Runner:
    """without: baselines to skip; quick: fewer replays; say: called with a line of progress."""

    def __init__(self, device: torch.device, *, without: Iterable[str], quick: bool, say: Say):
        self.device, self.without, self.quick, self.say = device, tuple(without), quick, say
        self._sweeps = Sweeps()
        self._models: dict[int, Decoding] = {}
        self._group: str | None = None

    def run(self, case: Case, seed: int, save: Save = lambda result: None) -> dict[str, Any]:
        """Measure a case; the result as a record's part. Raises as `run_case` and `Decoding.run` do.

        save: called with the result so far whenever a part of a long case is done.
        """
        if case.group != self._group:
            self._group = case.group
            for decoding in self._models.values():
                decoding.shared.clear()
        try:
            if case.group in MANY:
                return MANY[case.group](self._decoding(seed), case, save)
            if case.model is not None:
                return self._decoding(seed).run(case)
            replays = QUICK if self.quick else REPLAYS
            return run_case(
                case, self.device, without=self.without, replays=replays, seed=seed, say=self.say, sweeps=self._sweeps
            )
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _decoding(self, seed: int) -> Decoding:
        if seed not in self._models:
            self._models.clear()  # the model of another seed makes room
            self._models[seed] = Decoding(self.device, without=self.without, quick=self.quick, seed=seed, say=self.say)
        return self._models[seed]
