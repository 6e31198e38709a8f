"""Passes of several segments: each row is one segment's, and whatever is not so is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach import StreamingLLM
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod
from longreach.methods.dense import Dense
from longreach.ops import RowRange, Rows
from longreach.runtime import Ledger, Pass, Segment, attend_layer
from longreach.runtime.segments import check_segments
from tests.methods.drive import MODEL, Turn, call_of, new_cache, run, states_of, text

WINDOW = StreamingLLM(sinks=1, window=2)
FIRSTS = (5, 7)  # tokens of two sequences before the pass; three rows follow: 2 of the first, 1 of the second
RUNS = (RowRange(2, 0, 5), RowRange(1, 1, 7))


def attend(segments: tuple[Segment, ...], runs: Any = RUNS) -> Tensor:
    """[3, H, D]: layer 0 of a pass of three rows. runs: what the pass itself knows of them."""
    whole = text(30)
    cache = new_cache(slots=2)
    run(cache, Dense(), [Turn(whole, slot, first) for slot, first in enumerate(FIRSTS)])
    step = cache.begin([0, 1], [2, 1])
    at = step.pos
    cache.append(0, step, whole.k[0, at], whole.v[0, at])
    p = Pass(segments, MODEL, states_of(cache), Ledger())
    call = call_of(cache, p, 0, step, whole.q[0, at], whole.k[0, at])
    object.__setattr__(call.rows, "runs", runs)
    return attend_layer(p, call).partial.out


def segment(index: Any, *runs: RowRange, phase: Any = "prefill", method: AttentionMethod = WINDOW) -> Segment:
    return Segment(
        phase, method, (), torch.tensor(index, dtype=torch.int64) if isinstance(index, list) else index, runs
    )


def dense(index: Any, *runs: RowRange) -> Segment:
    return segment(index, *runs, phase="decode", method=Dense())


FIRST, SECOND = RUNS


@pytest.mark.parametrize("runs", [None, RUNS])
def test_each_row_gets_its_segments_method(runs: Any) -> None:
    want, windowed = attend((Segment("decode", Dense()),)), attend((Segment("decode", WINDOW),))
    got = attend((segment([2], SECOND), dense([0, 1], FIRST)), runs)
    torch.testing.assert_close(got, torch.cat([want[:2], windowed[2:]]), rtol=0, atol=1e-6)
    assert not torch.allclose(want, windowed)
    parted = attend((segment([0, 2], RowRange(1, 0, 5), SECOND), dense([1], RowRange(1, 0, 6))), runs)
    torch.testing.assert_close(parted, torch.stack([windowed[0], want[1], windowed[2]]), rtol=0, atol=1e-6)
    nameless = attend((segment([2], RowRange(1, 1)), dense([0, 1], RowRange(2, 0))), None)
    torch.testing.assert_close(nameless, got, rtol=0, atol=1e-6)


HALVES = "expected one without an index, or each with an index and runs"
REFUSED: dict[str, tuple[tuple[Segment, ...], str]] = {
    "none": ((), "expected at least one"),
    "two without an index": ((Segment("prefill", WINDOW), Segment("decode", Dense())), HALVES),
    "one without an index among others": ((segment([0, 1, 2], *RUNS), Segment("decode", Dense())), HALVES),
    "no runs": ((Segment("prefill", WINDOW, (), torch.arange(3)),), HALVES),
    "runs without an index": ((Segment("prefill", WINDOW, runs=RUNS),), "leave runs out"),
    "too few": ((segment([0], RowRange(1, 0, 5)), dense([2], SECOND)), "all 3 rows of the pass, each once, got 2"),
    "too many": ((segment([0, 1, 2], *RUNS), dense([2], SECOND)), "all 3 rows of the pass, each once, got 4"),
    "two methods of one phase": (
        (segment([2], SECOND), segment([0, 1], FIRST, method=Dense())),
        "one method for each phase",
    ),
    "twice and never": (
        (segment([0, 1], FIRST), dense([1], SECOND)),
        r"each row once, got \[1\] twice and \[2\] in none",
    ),
    "out of range": ((segment([0, 1], FIRST), dense([3], SECOND)), r"segment 1 \(decode\): index: .* in \[0"),
    "negative": ((segment([0, 1], FIRST), dense([-1], SECOND)), r"segment 1 .* in \[0, R=3\), got \[-1\]"),
    "back": ((segment([1, 0], FIRST), dense([2], SECOND)), r"segment 0 \(prefill\): index: .* ascending"),
    "int32": ((segment([0, 1], FIRST), dense(torch.tensor([2]).int(), SECOND)), r"int64 \[r\] on cpu, got int32"),
    "a bool mask": ((segment(torch.tensor([True, True, False]), FIRST), dense([2], SECOND)), "got bool"),
    "a rectangle": ((segment([[0, 1]], FIRST), dense([2], SECOND)), r"int64 \[r\] on cpu, got int64\[1, 2\]"),
    "a tuple": ((segment((0, 1), FIRST), dense([2], SECOND)), "got tuple"),
    "elsewhere": ((segment([0, 1], FIRST), dense(torch.tensor([2], device="meta"), SECOND)), "on cpu, got .* on meta"),
    "runs of fewer rows": ((segment([0, 1], RowRange(1, 0, 5)), dense([2], SECOND)), "its 2 rows, got runs of 1"),
    "runs of more rows": ((segment([0, 1], FIRST), dense([2], *RUNS)), "runs of its 1 rows, got runs of 3"),
    "a sequence there is not": ((segment([0, 1], FIRST), dense([2], RowRange(1, 2, 7))), r"sequences in \[0, 2\)"),
    "a negative sequence": ((segment([0, 1], FIRST), dense([2], RowRange(1, -1, 7))), r"sequences in \[0, 2\)"),
    "a negative count": (
        (segment([0, 1], RowRange(3, 0, 5), RowRange(-1, 0, 8)), dense([2], SECOND)),
        r"sequences in \[0, 2\)",
    ),
}  # fmt: skip
OTHER_RUNS: dict[str, tuple[Segment, ...]] = {  # as many rows, but of another sequence or at other positions
    "another sequence": (segment([0, 1], FIRST), dense([2], RowRange(1, 0, 7))),
}
OTHER_PLACES: dict[str, tuple[Segment, ...]] = {
    "sequences exchanged": (segment([0, 1], RowRange(1, 1, 7), RowRange(1, 0, 5)), dense([2], RowRange(1, 0, 6))),
    "another position": (segment([0, 1], FIRST), dense([2], RowRange(1, 1, 6))),
    "a gap": (segment([0, 1], RowRange(1, 0, 5), RowRange(1, 0, 7)), dense([2], SECOND)),
    "sequences exchanged in one segment": (segment([0, 2], SECOND, RowRange(1, 0, 5)), dense([1], RowRange(1, 0, 6))),
}


@pytest.mark.parametrize(("segments", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("runs", [None, RUNS], ids=["without runs", "with runs"])
def test_segments_that_are_not_the_rows_are_refused(segments: Any, message: str, runs: Any) -> None:
    with pytest.raises(InvalidInput, match=message):
        attend(segments, runs)


@pytest.mark.parametrize("segments", [*OTHER_RUNS.values(), *OTHER_PLACES.values()], ids=[*OTHER_RUNS, *OTHER_PLACES])
def test_runs_of_other_rows_are_refused(segments: Any) -> None:
    with pytest.raises(InvalidInput, match=r"expected RowRange\(rows=.*got rows of sequences"):
        attend(segments, None)


@pytest.mark.parametrize("segments", OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_runs_are_held_against_those_of_the_pass(segments: Any) -> None:
    """On every device, as both are on the host."""
    with pytest.raises(InvalidInput, match=r"these rows of each sequence: \{0: 2, 1: 1\}, got"):
        attend(segments, RUNS)


def test_elsewhere_than_on_a_cpu_no_value_is_read() -> None:
    """Values of a meta tensor cannot be read: to look at one would raise, where a GPU would sync."""
    meta = torch.empty(3, device="meta", dtype=torch.int64)
    rows = Rows(torch.empty(3, 4, 16, device="meta"), meta, meta)
    check_segments((segment(meta[:2], FIRST), dense(meta[:1], SECOND)), rows, 2)
    with pytest.raises(InvalidInput, match="all 3 rows"):
        check_segments((segment(meta[:2], FIRST),), rows, 2)
