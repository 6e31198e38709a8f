"""What is timed on a CPU is right, and the record says what ran."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from longreach.bench import cpu_sampling
from longreach.bench.check import WrongResult
from longreach.bench.cpu import decode, sampling
from longreach.bench.cpu.conditions import apart, cold, places_threads
from longreach.bench.cpu.inputs import LOCAL, SINKS, Preset, Problem, Shape
from longreach.bench.cpu.step import PARTS, Step, distance, exact
from longreach.errors import Unsupported
from longreach.methods.call import LayerCall
from longreach.methods.magicpig import MagicPIG
from longreach.methods.magicpig.state import LayerTables
from longreach.records.sources import source_hash
from longreach.records.stale import stale

pytest.importorskip("numba")
SMALL = Shape(700, heads=4, kv_heads=2, dim=16)
PRESETS = (Preset(4, 9, "own"), Preset(4, 6, "group"))


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measure, decoded = sampling.measure, decode.measure
    monkeypatch.setattr(sampling, "PRESETS", PRESETS)
    monkeypatch.setattr(sampling, "flush_bytes", lambda: 1 << 16)
    monkeypatch.setattr(sampling, "measure", lambda *given: measure(*given, shape=SMALL))
    monkeypatch.setattr(decode, "measure", lambda *given: decoded(*given, methods=["dense", "quest"]))
    before = torch.get_num_threads()
    try:
        cpu_sampling.main(
            ["--contexts", "700", "--threads", "1", "--rounds", "2", "--decoded", "300", "--repeats", "1",
             "--output", str(tmp_path / "r.json")]
        )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["kind"] == "cpu sampling" and record["sources"] == {"cpu_kernels": source_hash("cpu_kernels")}
    assert [case["preset"]["share"] for case in record["sampling"]] == ["own", "group"]
    assert record["config"]["threads_placed"] is places_threads()
    for case in record["sampling"]:
        assert set(case["parts"]) == set(PARTS) and case["error"] <= case["error_bound"] and case["rounds"] == 2
        assert 0 < case["keys_read"] < 1 and set(case["targets"]) == {"dense", "sdpa", "avx2"}
        assert set(case["seconds"]) == {
            "ours", "ours for AVX2", "torch matmul", "torch SDPA", "copy of keys", "longreach dense"
        }  # fmt: skip
    dense, quest = record["decode"]["methods"]
    assert dense["computed_by"]["reference"] == ["reference"] and "numba" in quest["computed_by"]["auto"][0]
    assert dense["same_tokens"] and quest["ratio"] > 0 and "target" in quest and "target" not in dense
    assert "decode quest" in capsys.readouterr().out
    folder = tmp_path / "others"
    folder.mkdir()
    (folder / "old.json").write_text(json.dumps({**record, "dirty": False, "sources": {"cpu_kernels": "0" * 64}}))
    assert any("the sources of cpu_kernels have changed" in fault.why for fault in stale(folder))


def test_the_oracle_of_a_step() -> None:
    """It attends to the lists by their weights, and to nothing else; a step of other lists is not right."""
    problem = Problem(SMALL, 0)
    step = Step(problem, PRESETS[1], problem.tables(4, 6, "numba"))
    assert int(step.tables.stop[0]) == SMALL.context - LOCAL
    result = step.run()
    want = exact(problem, result.lists, SMALL.context - LOCAL)
    assert float(distance(result.whole.out[0], want).max()) < 1e-5
    head = 2  # of the second KV head
    n = int(result.lists.count[0, 1])
    keys = result.lists.index[0, 1, :n].tolist()
    slots = [*range(SINKS), *keys, *range(SMALL.context - LOCAL, SMALL.context)]
    weight = torch.zeros(SMALL.context, dtype=torch.float64)
    weight[keys] = result.lists.log_weight[0, 1, :n].double()  # type: ignore[index]
    logits = problem.kv.k[0, 1, slots].double() @ problem.rows.q[0, head].double() * SMALL.scale + weight[slots]
    alone = torch.softmax(logits, 0) @ problem.kv.v[0, 1, slots].double()
    torch.testing.assert_close(want[head], alone)
    assert step.reads(result.lists)["rows"] == int(result.lists.count.sum())


def test_keys_are_centred_and_left_out_as_by_the_method() -> None:
    """The mean, and the slots in the tables, are those of MagicPIG's own state over the same keys."""
    problem = Problem(replace(SMALL, context=3000), 0)
    method = MagicPIG(4, 9, seed=0, dense_layers=())
    kv = problem.kv
    call = LayerCall(0, problem.rows, kv, torch.tensor([0]), problem.shape.scale)
    state = method.new_state(call, 1)
    assert isinstance(state, LayerTables)
    state.follow(call, kv.seq_lens)
    torch.testing.assert_close(problem.centre, state.centre)
    _, tables = problem.tables(4, 9, "numba")
    assert tables.first == state.tables.first and method.sinks == SINKS
    assert int(tables.stop[0]) == 3000 - method.local


def test_a_wrong_step_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(SMALL, 0)
    step = Step(problem, PRESETS[0], problem.tables(4, 9, "numba"))
    right = step.run()
    wrong = replace(right, whole=replace(right.whole, out=right.whole.out * 1.01))
    monkeypatch.setattr(step, "run", lambda: wrong)
    with pytest.raises(WrongResult, match="its time does not count"):
        sampling._check(step)


def test_without_numba_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sampling, "compiles", lambda device: False)
    with pytest.raises(Unsupported, match=r"pip install 'longreach\[cpu\]'"):
        cpu_sampling.main(["--output", str(tmp_path / "r.json")])


two_cpus = pytest.mark.skipif(not places_threads(), reason="threads are placed on Linux with two CPUs")


@contextmanager
def waiting_thread() -> Iterator[int]:
    """The id of another thread, which waits until the block ends."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        yield thread.native_id
    finally:
        end.set()
        thread.join()


@two_cpus
def test_threads_share_no_cpu_with_their_caller() -> None:
    allowed = os.sched_getaffinity(0)
    with waiting_thread() as other:
        with apart():
            own = os.sched_getaffinity(0)
            assert len(own) == 1 and os.sched_getaffinity(other) == allowed - own
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other) == allowed


@two_cpus
def test_affinities_are_restored_as_they_were() -> None:
    """Also after an error, of threads with an affinity of their own, and of threads that started within the block."""
    allowed = os.sched_getaffinity(0)
    with waiting_thread() as other:
        os.sched_setaffinity(other, {max(allowed)})
        with pytest.raises(ZeroDivisionError), apart():
            later = waiting_thread()
            new = later.__enter__()
            assert os.sched_getaffinity(new) == os.sched_getaffinity(0) != allowed
            _ = 1 / 0
        try:
            assert os.sched_getaffinity(other) == {max(allowed)}
            assert os.sched_getaffinity(0) == os.sched_getaffinity(new) == allowed
        finally:
            later.__exit__(None, None, None)


@two_cpus
def test_caches_are_overwritten_on_the_cpu_of_the_call() -> None:
    class Memory:
        where: set[int] | None = None

        def fill(self, value: int) -> None:
            self.where = os.sched_getaffinity(0)

    memory = Memory()
    with cold(memory):  # type: ignore[arg-type]
        assert memory.where == os.sched_getaffinity(0) and len(memory.where) == 1
    overwritten = np.zeros(8, np.uint8)
    with cold(overwritten):
        assert overwritten.all()
