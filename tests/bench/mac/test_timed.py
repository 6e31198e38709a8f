"""What is timed of MAC's step: it appends, finds memory cold, and what it reads counts with its ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.bench import timing
from longreach.bench.case import Case, Hits
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.inputs import Inputs, least_read
from longreach.bench.mac import check
from longreach.bench.mac.check import check_step
from longreach.bench.mac.forced_hits import ForcedHits
from longreach.bench.mac.run import run_mac
from tests.tiers import swept

CPU = torch.device("cpu")
BASE = Hits("it", gap=20, band=16)
STEP, ATTENTION = BASE, replace(BASE, part="attention")
VECTOR = 16 * 4  # bytes of a row of 16 channels in fp32
L2 = 1 << 20  # of a made-up GPU


def small(*hits: Hits, name: str = "mac-hit-128k-b8") -> Case:
    case = tiny(CASES[name])
    assert case.reuse is not None
    return replace(case, reuse=replace(case.reuse, hits=hits))


def planted(hits: Hits) -> ForcedHits:
    return ForcedHits(Inputs(small(hits), CPU), hits, "reference", 0)


@pytest.mark.parametrize("dense", [False, True])
def test_a_timed_step_appends_its_row(dense: bool) -> None:
    """Its place holds NaN: a step that does not append answers with NaN, and leaves it there."""
    one = planted(STEP)
    calls = [one.dense(copy) for copy in range(one.inputs.copies)] if dense else one.timed()
    assert len(calls) == one.inputs.copies
    for copy, timed in enumerate(calls):
        kv = one.calls[copy].kv
        before = kv.k[:, :, -1].clone(), kv.v[:, :, -1].clone()
        kv.k[:, :, -1], kv.v[:, :, -1] = torch.nan, torch.nan
        done = timed()
        outcome = done if dense else done[1]  # type: ignore[index]
        out = outcome.partial.out
        assert bool(torch.isfinite(out).all())
        assert torch.equal(kv.k[:, :, -1], before[0]) and torch.equal(kv.v[:, :, -1], before[1])


def test_bytes_that_a_hit_reads_are_keys_values_and_the_ring() -> None:
    """2 sequences of 2 KV heads read 36 keys and values; 4 query heads look through 64 rows of the ring."""
    keys_and_values = 2 * 2 * 2 * 36 * VECTOR
    ring = 2 * 4 * 64 * VECTOR
    assert least_read(small(STEP)) == keys_and_values + ring
    assert least_read(small(ATTENTION)) == keys_and_values
    assert least_read(small(STEP, ATTENTION)) == keys_and_values  # the least of the case
    assert least_read(small(STEP, replace(STEP, gap=60))) == keys_and_values + ring


@pytest.mark.parametrize("hits", swept([((STEP, ATTENTION),), ((STEP,),), ((ATTENTION,),)], 1))
def test_what_all_copies_read_exceeds_the_l2(hits: tuple[Hits, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bytes that the entries report, of which a step's are keys, values and the ring that it looks through."""
    monkeypatch.setattr(timing, "l2_bytes", lambda device: L2)
    case = small(*[replace(h, name=str(n)) for n, h in enumerate(hits)])
    result = run_mac(case, CPU, without=case.baselines, replays=2)
    least = min(entry["bytes_read"] for entry in result["entries"] if entry["name"] != "dense")
    assert result["copies"] * least >= 3 * L2
    assert (result["copies"] - 1) * least_read(case) < 3 * L2  # and no more memory than that takes


def test_a_steps_report_counts_its_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(replace(STEP, name="step"), replace(ATTENTION, name="attention"))
    result = run_mac(case, CPU, without=case.baselines, replays=2)
    read = {entry["name"]: entry["bytes_read"] for entry in result["entries"] if "bytes_read" in entry}
    assert read["attention"] == 2 * 2 * 2 * 36 * VECTOR
    assert read["step"] - read["attention"] >= 2 * 4 * 64 * VECTOR


def test_every_copy_has_a_ring_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda device: L2)
    one = planted(STEP)
    assert one.inputs.copies > 2
    for memory in (
        [state.ring.query for state in one.states],
        [state.entries.out for state in one.states],
        [call.kv.k for call in one.calls],
    ):
        assert len({x.data_ptr() for x in memory}) == one.inputs.copies


def test_a_step_a_few_roundings_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 3e-4 is no rounding, in the output as in the new entry."""
    one, exact = planted(STEP), check.exact
    check_step(one, 0)
    for part in (0, 1):

        def off(*given: Any, part: int = part) -> tuple[torch.Tensor, ...]:
            return tuple(x * (1 + 3e-4 * (number == part)) for number, x in enumerate(exact(*given)))

        monkeypatch.setattr(check, "exact", off)
        with pytest.raises(WrongResult, match="relative error 3"):
            check_step(one, 0)
