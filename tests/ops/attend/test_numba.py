"""attend's Numba kernel, compiled for this CPU, against the fp64 oracle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import KVView, Lists, RowRange, Rows, Span, Spans, absolute, attend, impl, numba_math, relative
from longreach.ops.attend import numba as kernel
from longreach.ops.attend import resolve
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.oracle import exact_attend, seen_keys
from longreach.testing.selections import Kind, random_lists, random_selection, random_spans
from longreach.testing.tolerance import assert_close, unit_roundoff
from tests.ops.cases import make_case
from tests.tiers import swept

KINDS: tuple[Kind, ...] = ("spans", "lists", "packed")
EXP = 2.0  # its exp errs by two units in the last place


def check(rows: Rows, kv: KVView, selection: Any, **logits: Any) -> torch.Tensor:
    logits = {"scale": rows.q.shape[2] ** -0.5, **logits}
    got = attend(rows, kv, selection, **logits, impl="numba")
    assert got.out.dtype == got.lse.dtype == torch.float32
    assert_close(got, exact_attend(rows, kv, selection, **logits), unit=EXP * unit_roundoff(torch.float32))
    return got.out


@pytest.mark.parametrize("seed", swept(range(200), 60))
def test_any_case(seed: int) -> None:
    case = make_case(seed)
    if case.kv.slot_pos is None:
        check(case.rows, case.kv, case.selection, **case.logits)
        return
    with pytest.raises(Unsupported, match="slots in the order of their positions"):
        attend(case.rows, case.kv, case.selection, **case.logits, impl="numba")


@pytest.mark.covering
@pytest.mark.parametrize("dim", [8, 40, 64, 72, 128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_head_dims_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    kv = random_kv([150, 0, 67], heads=2, dim=dim, dtype=dtype, page=16 if dim % 32 else None, memory="packed")
    rows = random_rows(kv, 4, group=5)
    check(rows, kv, Spans.dense())
    check(rows, kv, random_lists(rows, kv, weighted=True))


@pytest.mark.covering
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("per", ["kv", "query"])
@pytest.mark.parametrize("kind", KINDS)
def test_groups(group: int, per: Any, kind: Kind) -> None:
    kv = random_kv([33, 21], heads=2, dim=16, page=5)
    rows = random_rows(kv, 5, group=group)
    for seed in range(3):
        check(rows, kv, random_selection(kind, rows, kv, per=per, seed=seed), softcap=2.0 if seed else None)


def test_pieces_of_one_row_are_merged(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LEAST", 7)
    kv = random_kv([700, 0, 3], heads=2, dim=32, page=16, dtype=torch.bfloat16)
    rows = replace(random_rows(kv, 4, group=2), seq=torch.tensor([0, 1, 2, 0]), pos=torch.tensor([699, 0, 2, 350]))
    sink = torch.randn(4)
    for selection in (Spans.dense(), random_lists(rows, kv, weighted=True), random_spans(rows, kv, spans=3)):
        check(rows, kv, selection, sink_logit=sink)


def test_spans_that_overlap_are_read_once() -> None:
    kv = random_kv([60], heads=1, dim=16)
    rows = Rows(torch.randn(3, 2, 16), torch.zeros(3, dtype=torch.int64), torch.tensor([59, 30, 0]))
    spans = (Span(absolute(10), absolute(40)), Span(relative(-25), relative(1)), Span(absolute(0), absolute(12)))
    check(rows, kv, Spans(spans))
    check(rows, kv, Spans(()))


def test_an_overflow_reads_everything_and_entries_out_of_sight_nothing() -> None:
    kv = random_kv([40], heads=1, dim=16)
    rows = Rows(torch.randn(2, 1, 16), torch.zeros(2, dtype=torch.int64), torch.tensor([39, 9]))
    index = torch.tensor([[[3, 5, 7]], [[2, 30, 4]]])
    over = Lists(index, torch.tensor([[4], [3]]), log_weight=torch.randn(2, 1, 3))
    got = check(rows, kv, over)
    same = attend(rows, kv, Spans.dense(), scale=0.25, impl="numba")
    torch.testing.assert_close(got[:1], same.out[:1])


def test_what_no_row_names_is_never_read() -> None:
    kv = random_kv([50, 31], heads=2, dim=16, page=8)
    rows = random_rows(kv, 6)
    for kind in KINDS:
        selection = random_selection(kind, rows, kv, seed=5)
        before = attend(rows, kv, selection, scale=0.25, impl="numba")
        clean, read = replace(kv, k=kv.k.clone(), v=kv.v.clone()), seen_keys(rows, kv, selection)
        for b, length in enumerate(kv.seq_lens.tolist()):
            for g in range(2):
                mine = [
                    set(slots) for r, row in enumerate(read) if rows.seq[r] == b for slots in row[2 * g : 2 * g + 2]
                ]
                poison(clean, b, g, [n for n in range(length) if not any(n in slots for slots in mine)])
        after = attend(rows, clean, selection, scale=0.25, impl="numba")
        assert torch.equal(before.out, after.out) and torch.equal(before.lse, after.lse)


def test_nan_shows() -> None:
    """In a key that is read, alone or beside others: it must not look like a key without weight."""
    kv = random_kv([300], heads=1, dim=16)
    kv.k[0, 0, 10] = torch.nan
    rows = Rows(torch.randn(1, 2, 16), torch.zeros(1, dtype=torch.int64), torch.tensor([299]))
    for spans in (((10, 11),), ((0, 300),), ((0, 5), (200, 300))):
        selection = Spans(tuple(Span(absolute(a), absolute(b)) for a, b in spans))
        got = attend(rows, kv, selection, scale=0.2, impl="numba")
        read = any(a <= 10 < b for a, b in spans)
        assert bool(got.lse.isnan().all()) == read and bool(got.out.isnan().all()) == read


def test_half_precision_is_read_exactly() -> None:
    """Every float16, subnormal, infinite and NaN ones too: an attention over one key gives its value."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        v = bits.view(dtype).view(1, 1, -1, 16)
        kv = KVView(torch.zeros_like(v), v, torch.tensor([v.shape[2]]))
        pos = torch.arange(v.shape[2])
        rows = Rows(torch.zeros(len(pos), 1, 16, dtype=dtype), torch.zeros_like(pos), pos)
        got = attend(rows, kv, Spans.window(1), scale=1.0, impl="numba").out[:, 0]
        torch.testing.assert_close(got, v[0, 0].float(), rtol=0, atol=0, equal_nan=True)


def test_arguments_that_are_not_contiguous() -> None:
    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x], -1)[..., 0]

    kv = random_kv([50, 31], heads=2, dim=16, page=8)
    rows = random_rows(kv, 5)
    assert kv.block_table is not None
    kv = replace(kv, seq_lens=spread(kv.seq_lens), block_table=spread(kv.block_table))
    q = rows.q.transpose(0, 1).contiguous().transpose(0, 1)
    rows = Rows(q, spread(rows.seq), spread(rows.pos))
    lists = random_lists(rows, kv, weighted=True)
    assert lists.log_weight is not None
    lists = replace(lists, index=spread(lists.index), count=spread(lists.count), log_weight=spread(lists.log_weight))
    check(rows, kv, lists, sink_logit=spread(torch.randn(4)))
    check(replace(rows, q=spread(rows.q)), kv, Spans.window(9))


def test_sessions_in_several_threads(workers: int) -> None:
    """They share the pool of threads; each result is its own."""
    kv = random_kv([900], heads=2, dim=32)
    rows = [Rows(torch.randn(1, 4, 32), torch.zeros(1, dtype=torch.int64), torch.tensor([899])) for _ in range(6)]
    alone = [attend(one, kv, Spans.dense(), scale=0.2, impl="numba").out for one in rows]
    found = dict[int, torch.Tensor]()

    def work(number: int) -> None:
        torch.set_num_threads(workers)
        for _ in range(20):
            found[number] = attend(rows[number], kv, Spans.dense(), scale=0.2, impl="numba").out

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, want in enumerate(alone):
        torch.testing.assert_close(found[number], want, rtol=1e-5, atol=1e-6)


def test_an_error_in_a_thread_is_raised() -> None:
    def fails(worker: int, workers: int) -> None:
        if worker == 1:
            raise ValueError(f"worker {worker} of {workers}")

    with pytest.raises(ValueError, match="worker 1 of 3"):
        numba_math.in_threads(3, fails)


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_waits_for_kernels_in_other_threads(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another one comes while it waits."""
    ended, waited, together = list[int](), list[float](), threading.Barrier(3)

    def slow(worker: int, workers: int) -> None:
        together.wait(60)
        if not worker:
            raise KeyboardInterrupt
        threading.Event().wait(0.2)
        ended.append(worker)

    def interrupted(seconds: float) -> None:
        waited.append(seconds)
        threading.Event().wait(seconds)
        if again and len(waited) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(numba_math.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        numba_math.in_threads(3, slow)
    assert sorted(ended) == [1, 2] and len(waited) > 1


def test_work_in_turns_is_done_once() -> None:
    done = np.zeros(500, np.int64)

    def kernel(worker: int, workers: int, counter: np.ndarray) -> None:
        while (item := _take(counter)) < len(done):
            done[item] += 1

    for workers in (1, 3):
        numba_math.in_turns(workers, kernel)
    assert (done == 2).all()


def test_work_in_turns_does_not_wait_for_threads_that_have_not_begun() -> None:
    """They never begin: the caller's memory may be gone by then."""
    free, begun = threading.Event(), list[int]()
    late = threading.Barrier((os.cpu_count() or 1) + 1)
    for _ in range(os.cpu_count() or 1):
        numba_math._threads.submit(free.wait)
    try:
        numba_math.in_turns(2, lambda worker, workers, counter: begun.append(worker))
        assert begun == [0]
    finally:
        free.set()
    for _ in range(os.cpu_count() or 1):  # behind the thread that was late
        numba_math._threads.submit(late.wait, 60)
    late.wait(60)
    assert begun == [0]


def test_work_in_turns_waits_for_threads_that_have_begun() -> None:
    inside = threading.Barrier(2)

    def kernel(worker: int, workers: int, counter: np.ndarray) -> None:
        inside.wait(10)
        if worker:
            threading.Event().wait(0.1)
            raise ValueError("an error late")

    with pytest.raises(ValueError, match="an error late"):
        numba_math.in_turns(2, kernel)


@numba_math.njit(nogil=True)  # type: ignore[untyped-decorator]
def _take(counter: np.ndarray) -> Any:
    return numba_math.take(counter)


INTERRUPTED = """
import os, signal, threading
from longreach.ops import numba_math
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt = threading.Thread.start
def start(self):
    os.kill(os.getpid(), signal.SIGINT)
    interrupt(self)
threading.Thread.start = start
try:
    numba_math.in_threads(2, lambda worker, workers: None)
except KeyboardInterrupt:
    print("interrupted")
threading.Thread.start = interrupt
numba_math.in_threads(2, lambda worker, workers: None)
print("ended")
"""


def test_ctrl_c_while_the_first_threads_start() -> None:
    """Further calls work, and the process ends."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == ["interrupted", "ended"], done.stderr


FORKED = """
import os, torch
torch.set_num_threads(2)
from longreach.ops import Spans, attend
from longreach.testing.inputs import random_kv, random_rows
kv = random_kv([2000], heads=2, dim=16)
rows = random_rows(kv, 1)
before = attend(rows, kv, Spans.dense(), scale=0.2, impl="numba").out
child = os.fork()
if not child:
    after = attend(rows, kv, Spans.dense(), scale=0.2, impl="numba").out
    os._exit(0 if torch.allclose(before, after) else 3)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.split()[-1] == "0", done.stderr


def test_what_auto_is_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_kv([30, 20], heads=1, dim=16)
    rows = random_rows(kv, 4)
    assert resolve("auto", rows, kv, Spans.dense()) == "numba"
    seq = torch.zeros(20, dtype=torch.int64)
    many = Rows(torch.randn(20, 1, 16), seq, torch.arange(20), (RowRange(20, 0),))
    assert resolve("auto", many, kv, Spans.dense()) == "reference"  # a matrix product serves a prompt's rows better
    grown = replace(rows, q=rows.q.requires_grad_())
    assert resolve("auto", grown, kv, Spans.dense()) == "reference"
    with torch.no_grad():
        assert resolve("auto", grown, kv, Spans.dense()) == "numba"
    double = replace(kv, k=kv.k.double(), v=kv.v.double())
    assert resolve("auto", replace(rows, q=rows.q.detach().double()), double, Spans.dense()) == "reference"
    monkeypatch.setattr(impl, "_installed", lambda package: False)
    assert resolve("auto", rows, kv, Spans.dense()) == "reference"


def test_what_the_kernel_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_kv([30], heads=1, dim=16)
    rows = random_rows(kv, 2)
    with pytest.raises(Unsupported, match="no backward pass"):
        attend(replace(rows, q=rows.q.requires_grad_()), kv, Spans.dense(), scale=1.0, impl="numba")
    double = random_kv([30], heads=1, dim=16, dtype=torch.float64)
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        attend(random_rows(double, 2), double, Spans.dense(), scale=1.0, impl="numba")
    monkeypatch.setattr(impl, "_installed", lambda package: package != "numba")
    with pytest.raises(Unsupported, match=r"needs Numba.*pip install 'longreach\[cpu\]'"):
        attend(random_rows(kv, 2), kv, Spans.dense(), scale=1.0, impl="numba")


def test_query_heads_with_the_same_spans_and_others() -> None:
    """Heads of a group that share a span read its keys together, others each for itself."""
    kv = random_kv([60, 31], heads=2, dim=16, page=8)
    rows = replace(random_rows(kv, 2, group=2), seq=torch.arange(2), pos=torch.tensor([59, 30]))
    for starts in ([[9, 9, 3, 3], [0, 0, 20, 20]], [[9, 9, 3, 4], [0, 0, 20, 20]]):
        first = torch.tensor(starts)
        check(rows, kv, Spans((Span(absolute(0), absolute(2)), Span(absolute(first), relative(1))), "query"))
