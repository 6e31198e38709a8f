"""Segments: the rows of one pass that one method attends for, and the checks of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod, PromptObserver
from longreach.methods.call import ModelShape, Phase
from longreach.ops import Rows
from longreach.ops.types import RowRange, describe, require

PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Segment:
    """Rows of a pass that one method attends for.

    phase: one that the method fills. observers: decode methods that observe the rows. index: int64 [r] on the device of
    the rows, their numbers in the pass, ascending; None for all. runs: these rows' runs on the host, by slot; required
    with an index.
    """

    phase: Phase
    method: AttentionMethod
    observers: tuple[PromptObserver, ...] = ()
    index: Tensor | None = None
    runs: tuple[RowRange, ...] | None = None

    def __post_init__(self) -> None:
        method, phase = self.method, self.phase
        require(phase in PHASES, lambda: f"phase: expected one of {', '.join(PHASES)}, got {phase!r}")
        ok = isinstance(method, AttentionMethod)
        require(ok, lambda: f"method: expected a configured attention method, such as Quest(), got {method!r}")
        require(
            phase in method.phases,
            lambda: (
                f"method: expected one for {phase}, got {method.name}, which is for {', '.join(method.phases)} alone"
            ),
        )
        for observer in self.observers:
            if not isinstance(observer, PromptObserver):
                raise InvalidInput(f"observers: expected configured methods that observe prompts, got {observer!r}")

    def check(self, model: ModelShape) -> None:
        """Raise InvalidInput if an option of a method does not fit the model.

        A session whose model has `plans` has checked its methods itself.
        """
        if model.plans is not None:
            return
        for method in (self.method, *self.observers):
            if isinstance(method, AttentionMethod):
                _check_method(method, model)


@lru_cache
def _check_method(method: AttentionMethod, model: ModelShape) -> None:
    """Once for each method and model that fit: a check may look for a plan, and a pass makes it at every step."""
    method.check(model)


def check_segments(segments: Sequence[Segment], rows: Rows, sequences: int) -> None:
    """Raise InvalidInput unless the segments hold all rows of a pass over `sequences` sequences, each row once.

    Facts of the host are checked on every device: the number of rows, the sequences of the runs, and, where the pass
    has runs too, the rows of each sequence. That every row is in exactly one segment is checked on a CPU only:
    elsewhere that would be a device sync, rows in two segments get the last one's result, and rows in none are not
    written.
    """
    if len(segments) == 1 and segments[0].index is None:
        require(segments[0].runs is None, "segments: one without an index takes the call's own runs; leave runs out")
        return
    parts = [(s, s.index, s.runs) for s in segments if s.index is not None and s.runs is not None]
    if len(parts) != len(segments):
        raise InvalidInput("segments: expected one without an index, or each with an index and runs")
    total, indices, counted = rows.q.shape[0], list[Tensor](), Counter[int]()
    for number, (segment, index, runs) in enumerate(parts):
        where = _name(number, segment)
        ok = isinstance(index, Tensor) and index.dim() == 1 and index.dtype == torch.int64
        ok = ok and index.device == rows.q.device
        require(ok, lambda: f"{where}: index: expected int64 [r] on {rows.q.device}, got {describe(index)}")  # noqa: B023
        covered = sum(run.rows for run in runs)
        require(covered == len(index), f"{where}: expected runs of its {len(index)} rows, got runs of {covered}")
        inside = all(0 <= run.seq < sequences and run.rows >= 0 for run in runs)
        require(inside, f"{where}: expected runs of sequences in [0, {sequences}), got {list(runs)}")
        indices.append(index)
        counted += _rows_of_each(runs)
    found = sum(len(index) for index in indices)
    require(found == total, f"segments: expected all {total} rows of the pass, each once, got {found}")
    if rows.runs is not None:
        expected = _rows_of_each(rows.runs)
        require(
            counted == expected,
            f"segments: expected runs with these rows of each sequence: {dict(expected)}, got {dict(counted)}",
        )
    methods = {(s.phase, s.method) for s in segments}
    if len(methods) != len({s.phase for s in segments}):
        raise InvalidInput("segments: expected one method for each phase; reports are by phase")
    if rows.q.device.type == "cpu":
        _check_indices(segments, indices, total)


def check_runs(number: int, segment: Segment, rows: Rows) -> None:
    """Raise InvalidInput unless runs are the segment's rows in a layer. On a CPU only; elsewhere it does nothing."""
    runs, where = segment.runs, _name(number, segment)
    if rows.q.device.type != "cpu" or runs is None:
        return
    for run, seq, pos in zip(runs, *(x.split([r.rows for r in runs]) for x in (rows.seq, rows.pos)), strict=True):
        ascending = bool((pos.diff() > 0).all()) if run.first is None else pos.tolist() == list(_range(run))
        require(
            bool((seq == run.seq).all()) and ascending,
            lambda: f"{where}: expected {run}, got rows of sequences {seq.tolist()} at {pos.tolist()}",  # noqa: B023
        )


def _range(run: RowRange) -> range:
    return range(run.first or 0, (run.first or 0) + run.rows)


def _check_indices(segments: Sequence[Segment], indices: Sequence[Tensor], total: int) -> None:
    times = torch.zeros(total, dtype=torch.int64)
    for number, (segment, index) in enumerate(zip(segments, indices, strict=True)):
        where, numbers = _name(number, segment), index.tolist()
        require(all(0 <= n < total for n in numbers), f"{where}: index: expected rows in [0, R={total}), got {numbers}")
        require(bool((index.diff() > 0).all()), f"{where}: index: expected rows in ascending order, got {numbers}")
        times[index] += 1
    twice, never = ((times > 1).nonzero()[:, 0].tolist(), (times == 0).nonzero()[:, 0].tolist())
    require(not twice and not never, f"segments: expected each row once, got {twice} twice and {never} in none")


def _rows_of_each(runs: Iterable[RowRange]) -> Counter[int]:
    found = Counter[int]()
    for run in runs:
        if run.rows:
            found[run.seq] += run.rows
    return found


def _name(number: int, segment: Segment) -> str:
    return f"segment {number} ({segment.phase})"
