"""Launches of a call: Triton kernels from their launches, all kernels of the GPU from torch's profiler."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType

from longreach.records.kernels import PACKAGE, kernels
from longreach.records.launches import Launch, Launched, Scalar, together

if TYPE_CHECKING:
    from longreach.ops.triton_launches import Observed

LONGEST = 160  # characters of a kernel's name: C++ templates spell out all their arguments


class Launches:
    """Triton launches of a block, as `observed` collects them."""

    def __init__(self) -> None:
        self._seen: list[tuple[bool, Launch]] = []

    def note(self, observed: Observed) -> None:
        self._seen.append((observed.captured, _launch(observed)))

    @property
    def all(self) -> tuple[Launch, ...]:
        """Every launch, equal ones together."""
        return together(launch for _, launch in self._seen)

    @property
    def captured(self) -> tuple[Launch, ...]:
        """Launches made during a CUDA graph capture: for a single graph, those of its replay."""
        return together(launch for captured, launch in self._seen if captured)


@contextmanager
def observed() -> Iterator[Launches]:
    """The Triton launches of this block; none where Triton is not installed."""
    found = Launches()
    if importlib.util.find_spec("triton") is None:
        yield found
        return
    from longreach.ops.triton_launches import observe_launches

    with observe_launches(found.note):
        yield found


def launched(call: Callable[[], object], device: torch.device) -> Launched:
    """Launches of one call. The call is made once, outside any CUDA graph, after warm-up."""
    with observed() as seen:
        on_device = profiled(call, device)
    return Launched(seen.all, complete(on_device, seen.all))


def profiled(call: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """Name -> times of every kernel that a call runs on the GPU, graphs' kernels too; None on the CPU."""
    profile = Profile(device)
    profile.start()
    call()
    return profile.stop()


class Profile:
    """Kernels that run on the GPU between `start` and `stop`, whoever launches them."""

    def __init__(self, device: torch.device):
        self.device = device
        self._profiler: Any = None

    def start(self) -> None:
        """Count launches from now on."""
        if self.device.type == "cuda":
            _prime()
            torch.cuda.synchronize(self.device)
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.__enter__()

    def stop(self, parts: int = 1) -> dict[str, int] | None:
        """Name -> times, of one of `parts` equal parts; None on the CPU."""
        if self._profiler is None:
            return None
        torch.cuda.synchronize(self.device)
        self._profiler.__exit__(None, None, None)
        names = (e.name for e in self._profiler.events() if e.device_type == DeviceType.CUDA)
        self._profiler = None
        return counted(names, parts)


@cache
def _prime() -> None:
    """Profile nothing once: the first profile of a process sets the profiler up and may miss kernels meanwhile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


def counted(names: Iterable[str], parts: int = 1) -> dict[str, int]:
    """Name -> times, of one of `parts` equal parts, rounded; most frequent first."""
    found = Counter(name[:LONGEST] for name in names)
    return {name: max(1, round(times / parts)) for name, times in sorted(found.items(), key=lambda x: (-x[1], x[0]))}


def each(launches: Iterable[Launch], parts: int) -> tuple[Launch, ...]:
    """The launches of one of `parts` equal parts."""
    return tuple(replace(launch, times=max(1, round(launch.times / parts))) for launch in launches)


def complete(on_device: dict[str, int] | None, launches: Iterable[Launch]) -> dict[str, int] | None:
    """A profile's kernels, or None if it lacks a launch that was made: then its count is wrong."""
    if on_device is None:
        return None
    made: Counter[str] = Counter()
    for launch in launches:
        made[launch.kernel[:LONGEST]] += launch.times
    return None if any(on_device.get(name, 0) < times for name, times in made.items()) else on_device


def _launch(observed: Observed) -> Launch:
    function = observed.function
    file = _file(Path(function.__code__.co_filename))
    name = function.__name__
    sha256 = None if file is None else kernels()[file, name]
    if file is None:
        name = f"{function.__module__}.{name}"
    return Launch(
        name, file, sha256, {key: _scalar(value) for key, value in observed.constants.items()}, observed.warps,
        observed.stages, observed.grid, {key: _scalar(value) for key, value in observed.options.items()},
    )  # fmt: skip


def _file(path: Path) -> str | None:
    """A source below the package, as records name it; None for other libraries' files."""
    path = path.resolve()
    return path.relative_to(PACKAGE.resolve()).as_posix() if PACKAGE.resolve() in path.parents else None


def _scalar(value: Any) -> Scalar:
    """A constant as JSON has it: numbers, truth values, text and None as they are, anything else as text."""
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
