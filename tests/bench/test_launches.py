"""What a call launches, as records hold it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from longreach.bench import launches
from longreach.bench.case import Memory
from longreach.bench.cases import CASES, tiny
from longreach.bench.clock import Clock
from longreach.bench.competitor import ours
from longreach.bench.inputs import Inputs
from longreach.bench.launches import complete, counted, launched, observed, profiled
from longreach.bench.record import add
from longreach.bench.timing import measure
from longreach.ops.triton_launches import Observed
from longreach.records.kernels import kernels
from longreach.records.launches import Launch, Launched
from longreach.records.stale import stale

CPU = torch.device("cpu")


@triton.jit
def foreign(a, N: tl.constexpr):
    tl.store(a, N)


@pytest.fixture
def inputs() -> Inputs:
    return Inputs(tiny(CASES["dense-128k-b1"]), CPU)


def test_a_launch_names_its_kernel_its_hash_and_how_it_was_launched(inputs: Inputs) -> None:
    found = launched(ours(inputs, Memory(16), 1, "triton").calls[0], CPU)
    pieces, merge = found.triton
    known = kernels()
    assert (pieces.kernel, merge.kernel) == ("attend_pieces", "merge_pieces") and found.device is None
    assert all(known[str(one.file), one.kernel] == one.sha256 for one in found.triton)
    assert pieces.constants["PAGE"] == 16 and pieces.warps == 1 and pieces.grid == (2,)
    assert pieces.constants["form"].startswith("(")  # type: ignore[union-attr]
    assert Launched.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_another_layout_launches_otherwise(inputs: Inputs) -> None:
    one, same, other = (
        launched(ours(inputs, memory, 1, "triton").calls[0], CPU) for memory in (Memory(16), Memory(16), Memory(64))
    )
    assert one.differences(same) == []
    assert any("PAGE=16" in line for line in one.differences(other))


def test_a_kernel_that_changes_makes_the_cases_that_launch_it_stale(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for impl in ("triton", "reference"):
        found = launched(ours(inputs, Memory(), 1, impl).calls[0], CPU)
        entry = {"who": "longreach", "name": impl, "launched": found.to_json()}
        add(tmp_path / "g.json", "g", impl, {"commit": "a" * 40, "dirty": False, "entries": [entry]})
    assert stale(tmp_path) == []
    known = {place: "0" * 64 if place[1] == "merge_pieces" else sha256 for place, sha256 in kernels().items()}
    monkeypatch.setattr("longreach.records.launches.kernels", lambda: known)
    (fault,) = stale(tmp_path)
    assert fault.part == "triton"
    assert fault.why == "kernel merge_pieces (ops/attend/triton_merging.py) has changed since; measure it again"


def test_the_reference_launches_nothing(inputs: Inputs) -> None:
    assert launched(ours(inputs, Memory(), 1, "reference").calls[0], CPU) == Launched()


def test_what_is_timed_is_what_is_observed(inputs: Inputs) -> None:
    calls = {impl: ours(inputs, Memory(), 1, impl).calls for impl in ("triton", "reference")}
    times = measure(calls, CPU, replays=2, warm_up=1)
    assert [one.kernel for one in times["triton"].launched.triton] == ["attend_pieces", "merge_pieces"]  # type: ignore[union-attr]
    assert times["reference"].launched == Launched()


def test_a_kernel_of_another_library_is_named_without_a_hash() -> None:
    with observed() as seen:
        foreign[(1,)](torch.zeros(1), 3)
        foreign[(1,)](torch.zeros(1), 3)
    (one,) = seen.all
    assert (one.file, one.sha256, one.times) == (None, None, 2) and one.kernel.endswith("test_launches.foreign")


def test_launches_of_a_captured_graph_are_told_apart() -> None:
    def note(captured: bool, grid: int) -> None:
        seen.note(Observed(foreign.fn, {"N": 1}, {"launch_pdl": True}, 4, 3, (grid,), captured))

    seen = launches.Launches()
    for captured, grid in ((False, 1), (True, 2), (True, 2)):
        note(captured, grid)
    assert [(one.grid, one.times) for one in seen.captured] == [((2,), 2)]
    assert [one.grid for one in seen.all] == [(1,), (2,)] and seen.all[0].options == {"launch_pdl": True}


def test_without_triton_there_is_nothing_to_observe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with observed() as seen:
        foreign[(1,)](torch.zeros(1), 3)
    assert seen.all == ()


def test_kernels_are_counted_by_name_and_per_part() -> None:
    assert counted(["b", "a", "b", "x" * 999]) == {"b": 2, "a": 1, "x" * launches.LONGEST: 1}
    assert counted(["a"] * 6 + ["once"], parts=2) == {"a": 3, "once": 1}


def test_a_profile_that_lacks_a_launch_counts_nothing() -> None:
    one = Launch("look", "a.py", "0", {}, 4, 3, (1,), times=2)
    assert complete({"look": 2, "gemm": 1}, [one]) == {"look": 2, "gemm": 1}
    assert complete({"look": 1, "gemm": 1}, [one]) is None
    assert complete(None, [one]) is None


def test_a_profile_keeps_what_ran_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of the host, launches for one, stand beside them."""
    kinds = torch.autograd.DeviceType
    events = [SimpleNamespace(name=name, device_type=kind) for name, kind in (
        ("attend_pieces", kinds.CUDA), ("cudaLaunchKernel", kinds.CPU), ("Memset", kinds.CUDA),
    )]  # fmt: skip

    class Profiler:
        def __init__(self, **options: Any):
            assert options == {"activities": [torch.profiler.ProfilerActivity.CUDA]}

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

        def events(self) -> list[Any]:
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(launches, "_prime", lambda: None)
    called = []
    assert profiled(lambda: called.append(1), torch.device("cuda")) == {"Memset": 1, "attend_pieces": 1}
    assert called == [1]


def test_a_clock_names_what_a_token_launches_and_stops_observing() -> None:
    clock = Clock(CPU, (2, 2))

    def token() -> None:
        for _ in range(3):
            foreign[(1,)](torch.zeros(1), 3)
        clock.put(torch.zeros(1))

    for _ in range(7):  # the prompt and six tokens
        token()
    (one,) = clock.launched.triton
    assert one.times == 3
    ended = Clock(CPU, (1, 5))
    ended.put(torch.zeros(1))
    ended.put(torch.zeros(1))
    ended.close()
    run = type(foreign).run
    with observed():
        assert type(foreign).run is not run
    assert type(foreign).run is run and run.__qualname__ == "InterpretedFunction.run"
