"""Times of forward and backward of calls as training makes them: launched from Python, one call behind the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.bench.launches import launched
from longreach.bench.memory import allocated_bytes, peak_bytes, release, reset_peak
from longreach.bench.timing import Timing
from longreach.records.launches import Launched

HOW = "CUDA events around forward and backward, launched from Python"
AHEAD = f"{HOW} while the GPU still waits, as within a longer pass"
WAIT = 20_000_000  # cycles of the GPU, some 10 ms: enough to launch a forward and a backward
ON_CPU = "host clock, functional run only"


class Trial(NamedTuple):
    """Something to train. forward: makes an output that needs a gradient. inputs: tensors that get gradients."""

    forward: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]


class Trained(NamedTuple):
    """Times of forward, backward and both. peak: bytes allocated at most, beyond the inputs; None on a CPU."""

    forward: Timing
    backward: Timing
    both: Timing
    peak: int | None

    def recorded(self) -> dict[str, Any]:
        """The fields of a record's entry."""
        return {
            **self.both.recorded(),
            "forward_microseconds": self.forward.microseconds(),
            "backward_microseconds": self.backward.microseconds(),
            "memory": {"peak": self.peak},
        }


def measure_training(
    trials: Mapping[str, Trial], device: torch.device, *, replays: int, warm_up: int = 2, ahead: bool = False
) -> dict[str, Trained]:
    """Time trials in turns, another one first each time. An output's gradient is random, and the same each time.

    ahead: the GPU waits until all is launched, so that times are the kernels' and not the host's.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in trials}
    seeds = {name: torch.randn_like(trial.forward()) for name, trial in trials.items()}
    names = list(trials)
    for number in range(warm_up + replays):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            took = _once(trials[name], seeds[name], device, ahead)
            if number >= warm_up:
                times[name].append(took)
    found = {}
    for name, trial in trials.items():
        peak = _peak(trial, seeds[name], device)
        seen = launched(partial(_step, trial, seeds[name]), device)
        parts = zip(zip(*times[name], strict=True), _launched(trial, seeds[name], device), strict=True)
        forward, backward = (Timing.of(part, 1, _how(device, ahead), launches) for part, launches in parts)
        both = Timing.of([a + b for a, b in times[name]], 1, _how(device, ahead), seen)
        found[name] = Trained(forward, backward, both, peak)
    return found


def _how(device: torch.device, ahead: bool) -> str:
    return ON_CPU if device.type != "cuda" else AHEAD if ahead else HOW


def _step(trial: Trial, seed: Tensor) -> None:
    trial.forward().backward(seed)
    for x in trial.inputs:
        x.grad = None


def _launched(trial: Trial, seed: Tensor, device: torch.device) -> tuple[Launched, Launched]:
    """What forward and backward launch."""
    made: list[Tensor] = []
    forward = launched(lambda: made.append(trial.forward()), device)
    backward = launched(lambda: made.pop().backward(seed), device)
    for x in trial.inputs:
        x.grad = None
    return forward, backward


def _once(trial: Trial, seed: Tensor, device: torch.device, ahead: bool) -> tuple[float, float]:
    """Seconds of forward and backward."""
    if device.type != "cuda":
        clock = [time.perf_counter()]
        out = trial.forward()
        clock.append(time.perf_counter())
        out.backward(seed)
        clock.append(time.perf_counter())
    else:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize(device)
        if ahead:
            torch.cuda._sleep(WAIT)
        events[0].record()
        out = trial.forward()
        events[1].record()
        out.backward(seed)
        events[2].record()
        torch.cuda.synchronize(device)
        clock = [0.0, *(1e-3 * events[0].elapsed_time(event) for event in events[1:])]
    for x in trial.inputs:
        x.grad = None
    return clock[1] - clock[0], clock[2] - clock[1]


def _peak(trial: Trial, seed: Tensor, device: torch.device) -> int | None:
    release(device)
    before = allocated_bytes(device)
    reset_peak(device)
    _step(trial, seed)
    most = peak_bytes(device)
    return None if most is None or before is None else most - before
