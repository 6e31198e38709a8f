"""Times of calls as a decode graph makes them: CUDA graph replay, cold L2, competitors taking turns.

A competitor is a list of calls that do the same work on different copies of its inputs. Its graph goes through the
copies again and again; since together they exceed the L2 several times, every call finds it cold. Before each
timed replay a buffer as large is overwritten, which also keeps the GPU busy while the host prepares the launch.
On the CPU calls are timed one by one, to exercise the code: such numbers mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longreach.bench.launches import launched, observed
from longreach.errors import InvalidInput
from longreach.records.launches import Launched
from longreach.runtime.collector import collector_off

Call = Callable[[], object]
L2_MULTIPLE = 3  # copies exceed the L2 this many times
GRAPH_SECONDS = 4e-3  # a graph lasts about as long, so that starting it does not count
MOST_CALLS = 512  # of one graph


@dataclass(frozen=True)
class Timing:
    """Seconds per call in each replay, the clock used, and one call's launches (None: not observed)."""

    seconds: tuple[float, ...]
    calls: int
    how: str
    launched: Launched | None = field(default=None, compare=False)

    @classmethod
    def of(cls, seconds: Sequence[float], calls: int, how: str, launched: Launched | None = None) -> Timing:
        """seconds: of one call, a replay each; at least two."""
        return cls(tuple(seconds), calls, how, launched)

    @property
    def replays(self) -> int:
        return len(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third."""
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def first_quartile(self) -> float:
        return self.quartiles[0]

    @property
    def third_quartile(self) -> float:
        return self.quartiles[1]

    def microseconds(self, parts: int = 1) -> dict[str, Any]:
        """Microseconds of one of the equal `parts` of a call, as in records: median, quartiles, replays in order."""
        replays = [1e6 * seconds / parts for seconds in self.seconds]
        low, high = self.quartiles
        return {
            "median": self.median * 1e6 / parts,
            "first_quartile": low * 1e6 / parts,
            "third_quartile": high * 1e6 / parts,
            "replays": [round(us, 3) for us in replays],
        }

    def recorded(self, parts: int = 1) -> dict[str, Any]:
        """The fields of a record's entry that a timing gives. parts: as `microseconds` has it."""
        return {
            "microseconds": self.microseconds(parts),
            "calls_per_replay": self.calls,
            "launched": None if self.launched is None else self.launched.to_json(),
        }


def l2_bytes(device: torch.device) -> int:
    """Size of the last-level cache that inputs must exceed; 0 on the CPU, where times mean nothing."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def copies_needed(bytes_a_call: int, device: torch.device) -> int:
    """Number of input copies so that reads exceed L2_MULTIPLE times the L2."""
    return max(1, -(-L2_MULTIPLE * l2_bytes(device) // max(1, bytes_a_call)))


@torch.no_grad()
def measure(
    competitors: Mapping[str, Sequence[Call]],
    device: torch.device,
    *,
    replays: int = 21,
    warm_up: int = 3,
    launches: bool = True,
) -> dict[str, Timing]:
    """Time competitors in turns: in each round every one of them once, another one first each time.

    replays: rounds that count, at least 2; warm_up: rounds before them. launches: whether to observe what the first
    call of each launches, which takes a profile on a GPU.
    """
    if replays < 2 or not all(competitors.values()):
        raise InvalidInput(f"timing: expected at least 2 replays and a call of each competitor, got {replays} replays")
    if device.type != "cuda":
        return {name: _by_clock(calls, replays, warm_up) for name, calls in competitors.items()}
    graphs = {name: _Graph(calls) for name, calls in competitors.items()}
    scrub = torch.empty(L2_MULTIPLE * l2_bytes(device), dtype=torch.uint8, device=device)
    names = list(graphs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + replays):
        turn = number % len(names)
        started = []
        for name in names[turn:] + names[:turn]:
            scrub.fill_(number % 256)
            started.append((name, graphs[name].replay()))
        torch.cuda.synchronize(device)
        if number >= warm_up:
            for name, (start, stop) in started:
                seconds[name].append(start.elapsed_time(stop) * 1e-3 / graphs[name].calls)
    how = "CUDA graph replay, cold L2"
    seen = {name: launched(competitors[name][0], device) if launches else None for name in names}  # a profile: last
    return {name: Timing.of(seconds[name], graphs[name].calls, how, seen[name]) for name in names}


def _by_clock(calls: Sequence[Call], replays: int, warm_up: int) -> Timing:
    seconds = []
    with observed() as seen:
        seconds.append(_seconds(calls[0]))
    seconds += [_seconds(calls[number % len(calls)]) for number in range(1, warm_up + replays)]
    return Timing.of(seconds[warm_up:], 1, "host clock, functional run only", Launched(seen.all))


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class _Graph:
    """Calls captured in one CUDA graph, repeated until it lasts GRAPH_SECONDS."""

    def __init__(self, calls: Sequence[Call]):
        self._warm(calls)
        self._capture(calls, 1)
        self.replay()
        start, stop = self.replay()
        stop.synchronize()
        took = max(start.elapsed_time(stop) * 1e-3, 1e-6)
        times = max(1, min(round(GRAPH_SECONDS / took), MOST_CALLS // len(calls)))
        if times > 1:
            self._capture(calls, times)

    def _warm(self, calls: Sequence[Call]) -> None:
        """Compile and set up outside the graph, on a stream like the one that captures."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def _capture(self, calls: Sequence[Call], times: int) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.calls = times * len(calls)
        with collector_off(), torch.cuda.graph(self.graph):
            for _ in range(times):
                for call in calls:
                    call()

    def replay(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        stop.record()
        return start, stop
