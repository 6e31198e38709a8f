"""Forced steps: heads hit where they were told to, and what is wrong has no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.bench.case import Case, Hits, Memory
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult, require_right
from longreach.bench.inputs import Inputs
from longreach.bench.mac.check import check_step
from longreach.bench.mac.forced_hits import ForcedHits
from longreach.methods.call import LayerCall

CPU = torch.device("cpu")
BASE = Hits("it", gap=20, band=16)


def planted(hits: Hits, case: Case = CASES["mac-hit-128k-b8"]) -> ForcedHits:
    small = tiny(case)
    return ForcedHits(Inputs(small, CPU), replace(hits, name="it"), "reference", 0)


@pytest.mark.parametrize(
    ("hits", "reused", "resting"),
    [
        (BASE, 4, 0),
        (replace(BASE, rate=0.0), 0, 4),
        (replace(BASE, rate=0.0, guard=False), 0, 0),
        (replace(BASE, misses="one"), 3, 0),
        (replace(BASE, misses="each"), 2, 0),
        (replace(BASE, misses="each", spread=True), 4, 0),
    ],
)
def test_heads_do_as_they_were_told(hits: Hits, reused: int, resting: int) -> None:
    one = planted(hits)
    assert check_step(one, 0) < 1e-5
    assert int(one.reuse[0].sum()) == reused and int(one.rests[0].sum()) == resting
    call, _ = one.run(0)
    (counted,) = (noted.read.counted for noted in call.meter.noted if noted.read.counted is not None)
    assert torch.equal(counted == one.gap + one.band, one.reuse[0])
    told = one.described()
    assert told["kv_heads_that_reuse"] == reused / 4 and told["kv_heads_that_rest"] == resting / 4


def test_a_group_whose_heads_do_not_all_hit_reads_everything() -> None:
    one = planted(replace(BASE, rate=0.7, guard=False))
    assert int(one.hit[0].sum()) > 2 * int(one.reuse[0].sum())
    check_step(one, 0)


def test_parts_do_what_the_step_does() -> None:
    one = planted(BASE)
    whole = one.step(0)()[1].partial
    attended, _ = one.attention(0)()
    torch.testing.assert_close(attended.out, whole.out)
    assert len(one.timed()) == one.inputs.copies
    require_right("dense", one.inputs, Memory(), 1, one.dense(0)().partial.out)


def test_an_appended_row_changes_nothing() -> None:
    one = planted(BASE)
    before = one.calls[0].kv.k.clone()
    one.append(0)()
    assert torch.equal(one.calls[0].kv.k, before)
    one.calls[0].kv.k[:, :, -1] = 0
    one.append(0)()
    assert bool((one.calls[0].kv.k[:, :, -1] == 0).all())


def test_a_row_that_is_not_found_is_seen() -> None:
    one = planted(BASE)
    one.states[0].ring.query[1, 3, one.place(one.states[0])] += 9
    with pytest.raises(WrongResult, match="other keys than was forced"):
        check_step(one, 0)


def change_match(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Let `change` edit the results of the op `match`."""
    op = LayerCall.op

    def changed(self: LayerCall, name: str, *args: Any, **given: Any) -> Any:
        result = op(self, name, *args, **given)
        return change(result) if name == "match" else result

    monkeypatch.setattr(LayerCall, "op", changed)


@pytest.mark.parametrize("hits", [BASE, replace(BASE, misses="each")])
def test_another_entry_is_seen(hits: Hits, monkeypatch: pytest.MonkeyPatch) -> None:
    one = planted(hits)
    change_match(monkeypatch, lambda found: found._replace(read_entry=found.read_entry.roll(1, 1)))
    with pytest.raises(WrongResult, match="relative error"):
        check_step(one, 0)


def test_a_new_entry_in_another_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    one = planted(BASE)
    change_match(monkeypatch, lambda found: found._replace(write_entry=found.write_entry - 1))
    with pytest.raises(WrongResult, match="relative error"):
        check_step(one, 0)
