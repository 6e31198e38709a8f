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
from dataclasses import dataclass

import torch

from longreach.errors import InvalidInput

Call = Callable[[], object]
L2_MULTIPLE = 3  # copies exceed the L2 this many times
GRAPH_SECONDS = 4e-3  # a graph lasts about as long, so that starting it does not count
MOST_CALLS = 512  # of one graph


@dataclass(frozen=True)
class Timing:
    """Seconds a call over all replays, and how they were taken."""

    median: float
    first_quartile: float
    third_quartile: float
    calls: int
    replays: int
    how: str

    @classmethod
    def of(cls, seconds: Sequence[float], calls: int, how: str) -> Timing:
        """seconds: of one call, a replay each; at least two."""
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(middle, low, high, calls, len(seconds), how)

    def microseconds(self, parts: int = 1) -> dict[str, float]:
        """Of one of the equal `parts` of a call, as records have them."""
        return {
            "median": self.median * 1e6 / parts,
            "first_quartile": self.first_quartile * 1e6 / parts,
            "third_quartile": self.third_quartile * 1e6 / parts,
        }


def l2_bytes(device: torch.device) -> int:
    """Size of the last-level cache that inputs must exceed; 0 on the CPU, where times mean nothing."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def copies_needed(bytes_a_call: int, device: torch.device) -> int:
    """Copies of inputs whose reads exceed the L2 L2_MULTIPLE times."""
    return max(1, -(-L2_MULTIPLE * l2_bytes(device) // max(1, bytes_a_call)))


@torch.no_grad()
def measure(
    competitors: Mapping[str, Sequence[Call]], device: torch.device, *, replays: int = 21, warm_up: int = 3
) -> dict[str, Timing]:
    """Time competitors in turns: in each round every one of them once, another one first each time.

    replays: rounds that count, at least 2; warm_up: rounds before them.
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
    return {name: Timing.of(seconds[name], graphs[name].calls, "CUDA graph replay, cold L2") for name in names}


def _by_clock(calls: Sequence[Call], replays: int, warm_up: int) -> Timing:
    seconds = []
    for number in range(warm_up + replays):
        start = time.perf_counter()
        calls[number % len(calls)]()
        seconds.append(time.perf_counter() - start)
    return Timing.of(seconds[warm_up:], 1, "host clock, functional run only")


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
        with torch.cuda.graph(self.graph):
            for _ in range(times):
                for call in calls:
                    call()

    def replay(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        stop.record()
        return start, stop
