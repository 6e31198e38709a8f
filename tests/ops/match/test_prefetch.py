"""The guesses that `search` makes before it waits for the kernel before it (triton_prefetch), on the interpreter.

The interpreter has neither gdc_wait nor prefetches, so they are played here: until gdc_wait, the memory that a kernel
before may still write holds something else; a prefetch notes the addresses that it asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longreach.ops.match import Ring, Rule, match, nearest, triton_kernels, triton_prefetch
from longreach.ops.match import triton as kernels
from longreach.ops.match.triton_tuning import INTERPRETED, Tuning
from longreach.ops.types import Rows

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="plays the GPU where there is none")

SEQUENCES, HEADS, KV_HEADS, DIM, WINDOW, SIZE = 3, 4, 2, 16, 9, 13
RULE = Rule(WINDOW, 2, limit=40.0, deepest=9)
FAR = 2**31 - 5
TUNED = {
    "one block": Tuning(16, 1, 1, 1, chained=True),
    "pieces": Tuning(4, 3, 1, 1, chained=True),
    "blocks": Tuning(4, 1, 1, 2, chained=True),
    "two kernels": Tuning(4, 3, 1, 1, joined=False, chained=True),
}
every_tuning = pytest.mark.parametrize("tune", TUNED.values(), ids=TUNED)


def shares(tune: Tuning) -> tuple[int, int]:
    """(rows of the ring that a program goes through, programs for one ring)."""
    ages = -(-WINDOW // (tune.pieces * tune.block)) * tune.block
    return ages, -(-WINDOW // ages)


class Machine:
    """What surrounds the kernels of one call: memory that is late, and a log of the bytes that were prefetched."""

    def __init__(self, programs: int):
        self.late: list[tuple[Tensor, Tensor, Tensor]] = []  # memory, its content before gdc_wait, and after
        self.programs, self.done, self.waits = programs, 0, 0
        self.fetched: list[tuple[int, int]] = []  # [first byte, one past the last)

    def hold_back(self, memory: Tensor, before: Any) -> None:
        """Until gdc_wait, `memory` has another content."""
        stale = torch.as_tensor(before, dtype=memory.dtype).expand(memory.shape).clone()
        self.late.append((memory, stale, memory.clone()))
        memory.copy_(stale)

    def wait(self) -> None:
        self.waits += 1
        for memory, _, right in self.late:
            memory.copy_(right)

    def launch_dependents(self) -> None:
        """This program of `search` is done with what was late: for the next one it is late again."""
        self.done += 1
        for memory, stale, _ in self.late if self.done < self.programs else ():
            memory.copy_(stale)

    def fetch_lines(self, at: Any, mask: Any) -> None:
        for address in np.broadcast_to(at.handle.data, np.shape(mask.handle.data))[mask.handle.data != 0].tolist():
            self.fetched.append((address, address + 1))

    def fetch_stretch(self, at: Any, size: Any) -> None:
        (first,), (length,) = np.atleast_1d(at.handle.data), np.atleast_1d(size.handle.data)
        if int(length) > 0:
            assert int(length) % 16 == 0
            self.fetched.append((int(first) // 16 * 16, int(first) // 16 * 16 + int(length)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(0)
    monkeypatch.setattr(triton_kernels, "gdc_wait", made.wait)
    monkeypatch.setattr(triton_kernels, "gdc_launch_dependents", made.launch_dependents)
    monkeypatch.setattr(triton_prefetch, "fetch_lines", made.fetch_lines)
    monkeypatch.setattr(triton_prefetch, "fetch_stretch", made.fetch_stretch)
    yield made


def filled(lengths: dict[int, int]) -> Ring:
    """The last rows, random, of the sequences that lie in these slots and have so many; elsewhere NaN."""
    made = Ring.new(SEQUENCES, KV_HEADS, (HEADS, SIZE, DIM), torch.empty(0))
    made.query.fill_(torch.nan)
    made.credit.fill_(torch.nan)
    for slot, length in lengths.items():
        for p in range(max(0, length - SIZE), length):
            made.stamp[slot, p % SIZE] = p
            made.query[slot, :, p % SIZE] = torch.randn(HEADS, DIM)
            made.depth[slot, :, p % SIZE] = torch.randint(0, 12, (HEADS,)).short()
            made.credit[slot, :, p % SIZE] = 2.0
    return made


def copy_of(held: Ring) -> Ring:
    return Ring(**{name: x.clone() for name, x in vars(held).items()})


def memory_of(held: Ring) -> list[tuple[int, int]]:
    return [(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in vars(held).values()]


def lies_in(pieces: list[tuple[int, int]], whole: list[tuple[int, int]]) -> bool:
    return all(any(a <= first and last <= b for a, b in whole) for first, last in pieces)


# what stands in the inputs until gdc_wait; slots, sequences and positions of two rows
LATE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "positions one step behind": {"pos": [20, 6]},
    "positions ahead": {"pos": [24, 9]},
    "positions that are none": {"pos": [-(2**31), FAR]},
    "other sequences": {"seq": [1, 0]},
    "sequences that are none": {"seq": [-7, FAR]},
    "slots that are none": {"slots": [FAR, -1]},
    "everything": {"pos": [FAR, -9], "seq": [FAR, -1], "slots": [-3, 17], "credit": torch.nan, "stamp": 77},
    "accounts that rest": {"credit": -3.0},
    "accounts that do not rest": {"credit": 3.0, "rests": True},
}
FAST = (("everything", "one block"), ("everything", "two kernels"), ("positions ahead", "blocks"),
        ("accounts that rest", "pieces"), ("nothing", "one block"), ("slots that are none", "one block"))  # fmt: skip


@pytest.mark.parametrize(
    ("late", "tune"),
    [
        pytest.param(late, tune, marks=() if (late, tune) in FAST else pytest.mark.sweep)
        for late in LATE
        for tune in TUNED
    ],
)
def test_a_wrong_guess_changes_nothing(machine: Machine, tune: str, late: str) -> None:
    """Whatever stands in the inputs before the wait: the result is the reference's, and no prefetch leaves the ring."""
    tuning, before = TUNED[tune], LATE[late]
    seq, slots, pos = torch.tensor([1, 0]), torch.tensor([0, 2]), torch.tensor([21, 7])
    held = filled({2: 21, 0: 7})
    if "rests" in before:
        held.credit.clamp_(max=-2.0)
    rows = Rows(torch.randn(2, HEADS, DIM), seq, pos)
    other = copy_of(held)
    want = match(rows, slots, other, RULE, impl="reference")

    machine.programs = 2 * HEADS * shares(tuning)[1]
    given = {"pos": rows.pos, "seq": rows.seq, "slots": slots}
    for name in given.keys() & before.keys():
        machine.hold_back(given[name], before[name])
    for slot, at in ((2, 20 % SIZE), (0, 6 % SIZE)):  # the rows just before, which another kernel may have written
        if "credit" in before:
            machine.hold_back(held.credit[slot, :, at], before["credit"])
        if "stamp" in before:
            machine.hold_back(held.stamp[slot, at], before["stamp"])
    got = kernels.match(rows, slots, held, RULE, None, None, tune=tuning)

    assert machine.done >= machine.programs and machine.waits == machine.done
    for name, x, y in zip(got._fields, got, want, strict=True):
        torch.testing.assert_close(x, y, msg=name)
    for name, x in vars(held).items():
        torch.testing.assert_close(x, getattr(other, name), equal_nan=True, msg=name)
    assert bool((got.read_entry >= 0).any()) != ("rests" in before), "there should be something to find"
    assert machine.fetched and lies_in(machine.fetched, memory_of(held))


@every_tuning
def test_a_right_guess_prefetches_what_is_read(machine: Machine, tune: Tuning) -> None:
    """Queries, stamps and depths of the rows that each program reads first, no other queries, and the arrivals."""
    held, (ages, pieces) = filled({0: 21, 1: 7}), shares(tune)
    machine.programs = 2 * HEADS * pieces
    rows = Rows(torch.randn(2, HEADS, DIM), torch.arange(2), torch.tensor([21, 7]))
    kernels.match(rows, torch.arange(2), held, RULE, None, None, tune=tune)
    fetched = {byte for first, last in machine.fetched for byte in range(first, last)}
    queries, wanted = held.query.data_ptr(), set[int]()
    ahead = ages if ages == tune.block else 2 * tune.block
    for s, p in enumerate((21, 7)):
        for back in range(min(WINDOW, p - RULE.oldest)):
            if back % ages >= ahead:
                continue
            place = (p - 1 - back) % SIZE
            assert held.stamp[s, place].data_ptr() in fetched
            for h in range(HEADS):
                assert held.depth[s, h, place].data_ptr() in fetched
                first = held.query[s, h, place].data_ptr()
                wanted.update(range(first, first + DIM * 4))
        assert all(held.arrivals[s, g].data_ptr() in fetched for g in range(KV_HEADS))
    assert {byte for byte in fetched if queries <= byte < queries + held.query.numel() * 4} == wanted


@pytest.mark.parametrize(
    ("late", "tune"),
    [
        ({"pos": [FAR, -5], "seq": [9, -9]}, "two kernels"),
        pytest.param({}, "two kernels", marks=pytest.mark.sweep),
        pytest.param({"pos": [FAR, -5], "seq": [9, -9]}, "blocks", marks=pytest.mark.sweep),
    ],
)
def test_nearest_guesses_too(machine: Machine, tune: str, late: dict[str, Any]) -> None:
    slot, pos = torch.tensor([2, 0]), torch.tensor([21, 7])
    held, query = filled({2: 21, 0: 7}), torch.randn(2, HEADS, DIM)
    bounds: dict[str, Any] = {"window": WINDOW, "oldest": 2, "near": 1, "far": 1 << 30, "deepest": 9}
    want = nearest(query, slot, pos, held, impl="reference", **bounds)
    machine.programs = 2 * HEADS * shares(TUNED[tune])[1]
    for name, memory in (("pos", pos), ("seq", slot)):
        if name in late:
            machine.hold_back(memory, late[name])
    got = kernels.nearest(query, slot, pos, held, tune=TUNED[tune], **bounds)
    assert torch.equal(got.position, want.position) and bool((got.position >= 0).any())
    torch.testing.assert_close(got.distance, want.distance)
    assert machine.fetched and lies_in(machine.fetched, memory_of(held))
