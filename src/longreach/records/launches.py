"""What a timed call launched: kept in records of speed, compared with the sources and with later runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from longreach.records.kernels import kernels

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Launch:
    """One Triton kernel as a call launches it, `times` times.

    file: below the package; None for a kernel of another library, which then has no sha256. constants: constexpr
    arguments by name; tuples and dtypes as text. options: launch options besides warps and stages.
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
        """All that says how a kernel runs, hashable; a kernel of the package goes by its hash, not by its name."""
        who = self.sha256 or f"{self.file}:{self.kernel}"
        settings = (tuple(sorted(self.constants.items())), tuple(sorted(self.options.items())))
        return who, *settings, self.warps, self.stages, self.grid

    def to_json(self) -> dict[str, Any]:
        """As records hold it."""
        return {**asdict(self), "grid": list(self.grid)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Launch:
        """Raises TypeError where a field is missing or unknown."""
        found = cls(**given)
        return replace(found, grid=tuple(found.grid))


@dataclass(frozen=True)
class Launched:
    """What one call launched.

    triton: Triton kernels, each distinct launch once, in order of first appearance. device: name -> times of every
    kernel that ran on the GPU, Triton's and others' (copies and memsets too), as torch's profiler reports them; None on
    the CPU, or where the profiler saw fewer kernels than were launched.
    """

    triton: tuple[Launch, ...] = ()
    device: dict[str, int] | None = None

    @property
    def count(self) -> int | None:
        """Kernels that ran on the GPU."""
        return None if self.device is None else sum(self.device.values())

    def to_json(self) -> dict[str, Any]:
        """As records hold it."""
        return {"kernels": self.count, "triton": [launch.to_json() for launch in self.triton], "device": self.device}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Launched:
        """Raises KeyError or TypeError where it is no such thing."""
        return cls(tuple(Launch.from_json(launch) for launch in given["triton"]), given["device"])

    def differences(self, later: Launched) -> list[str]:
        """How a later call's launches differ, in words; empty where they are the same.

        Kernels that no source is known of are compared where both runs have them.
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
    """Equal launches as one, with how often; in order of first appearance."""
    found: dict[tuple[Any, ...], Launch] = {}
    for launch in launches:
        known = found.get(launch.shape)
        found[launch.shape] = launch if known is None else replace(known, times=known.times + launch.times)
    return tuple(found.values())


def outdated(launches: Iterable[Launch]) -> Iterator[str]:
    """Kernels that the sources no longer hold as they were launched, each with the reason, once.

    A kernel that moved or was renamed, and is otherwise the same, is not outdated.
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
