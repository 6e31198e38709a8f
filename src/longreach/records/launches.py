"""Kernel launches of a timed call: kept in speed records, compared with the sources and with later runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from longreach.records.kernels import kernels

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Launch:
    """One Triton kernel with its launch settings, launched `times` times in a call.

    file: path below the package; None, as is sha256, for a kernel of another library. constants: constexpr
    arguments by name; tuples and dtypes as text. options: launch options other than warps and stages.
    """

    kernel: str
    file: str | None
    sha256: str | None
    constants: dict[str, Scalar]
    warps: int | None
    stages: int | None
    grid: tuple[int, ...]
    options: dict[str, Scalar] = field(default_factory=dict)
    times: int = 1

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything that determines how the kernel runs, hashable. Kernels of the package are identified by hash."""
        who = self.sha256 or f"{self.file}:{self.kernel}"
        settings = (tuple(sorted(self.constants.items())), tuple(sorted(self.options.items())))
        return who, *settings, self.warps, self.stages, self.grid

    def to_json(self) -> dict[str, Any]:
        """The JSON that records contain."""
        return {**asdict(self), "grid": list(self.grid)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Launch:
        """Raises TypeError if a field is missing or unknown."""
        found = cls(**given)
        return replace(found, grid=tuple(found.grid))


@dataclass(frozen=True)
class Launched:
    """All kernels launched by one call.

    triton: distinct launches of Triton kernels, in order of first appearance. device: name -> count of all kernels on
    the GPU, including copies and memsets, from torch's profiler; None on the CPU, or if the profiler reported fewer
    kernels than were launched.
    """

    triton: tuple[Launch, ...] = ()
    device: dict[str, int] | None = None

    @property
    def count(self) -> int | None:
        """Number of kernels that ran on the GPU, if known."""
        return None if self.device is None else sum(self.device.values())

    def to_json(self) -> dict[str, Any]:
        """The JSON that records contain."""
        return {"kernels": self.count, "triton": [launch.to_json() for launch in self.triton], "device": self.device}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Launched:
        """Raises KeyError or TypeError if it cannot be read."""
        return cls(tuple(Launch.from_json(launch) for launch in given["triton"]), given["device"])

    def differences(self, later: Launched) -> list[str]:
        """Differences of a later call's launches, as text; empty if there are none.

        Kernels of other libraries are compared only if both calls have device counts.
        """
        before, now = _counted(self.triton), _counted(later.triton)
        found = []
        names = {launch.shape: launch.kernel for launch in (*self.triton, *later.triton)}
        for shape in before.keys() | now.keys():
            if before[shape] != now[shape]:
                found.append(f"{names[shape]}: {_described(shape)}: {before[shape]} before, {now[shape]} now")
        if self.device is not None and later.device is not None:
            ours = {launch.kernel for launch in (*self.triton, *later.triton)}
            for name in self.device.keys() | later.device.keys():
                was, today = self.device.get(name, 0), later.device.get(name, 0)
                if was != today and name not in ours:
                    found.append(f"{name[:60]}: {was} before, {today} now")
        return sorted(found)


def together(launches: Iterable[Launch]) -> tuple[Launch, ...]:
    """Merge equal launches and add up their counts; in order of first appearance."""
    found: dict[tuple[Any, ...], Launch] = {}
    for launch in launches:
        known = found.get(launch.shape)
        found[launch.shape] = launch if known is None else replace(known, times=known.times + launch.times)
    return tuple(found.values())


def outdated(launches: Iterable[Launch]) -> Iterator[str]:
    """A reason for each kernel that has changed in the sources since it was launched.

    A kernel that was only moved or renamed has not changed.
    """
    known = kernels()
    hashes, names = set(known.values()), {name for _, name in known}
    for kernel, file, sha256 in dict.fromkeys((x.kernel, x.file, x.sha256) for x in launches if x.file is not None):
        if sha256 in hashes:
            continue
        if (file, kernel) in known or kernel in names:
            yield f"kernel {kernel} ({file}) has changed since"
        else:
            yield f"kernel {kernel} ({file}) no longer exists"


def _counted(launches: Iterable[Launch]) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for launch in launches:
        found[launch.shape] += launch.times
    return found


def _described(shape: tuple[Any, ...]) -> str:
    who, constants, options, warps, stages, grid = shape
    named = [f"{name}={value}" for name, value in (*constants, *options)]
    return f"{str(who)[:12]}, grid {grid}, warps {warps}, stages {stages}, {' '.join(named)}"
