"""MixState: passes over several layers equal the whole, and cuts lead to where a pass or a snapshot was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.cache.mix_state import PASSES, MixState
from longreach.errors import Unsupported
from longreach.ops.scan import scan

HEADS, WIDTH, BLOCK, SLOTS = 2, 3, 4, 3
DECAY = torch.tensor([0.5, 0.9])
LAYERS = (0, 2)


@dataclass
class Model:
    """Two layers over tokens of three sequences, which are drawn by position."""

    state: MixState = field(default_factory=lambda: MixState(SLOTS, "cpu", means=True, block=BLOCK))
    texts: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    seed: int = 0

    def read(self, *counts: int, slots: tuple[int, ...] = (0, 1, 2), fail: bool = False) -> None:
        """A pass of counts[b] tokens of slots[b]. fail: after the first layer."""
        self.seed += 1
        fresh = torch.randn(sum(counts), HEADS, WIDTH, generator=torch.Generator().manual_seed(self.seed))
        before = [len(self.texts[slot]) for slot in slots]
        seq = torch.repeat_interleave(torch.arange(len(slots)), torch.tensor(counts))
        pos = torch.cat([torch.arange(n, n + c) for n, c in zip(before, counts, strict=True)])
        at = torch.tensor(slots)
        turn = self.state.begin(at, seq, pos)
        units = -(-max(n + c for n, c in zip(before, counts, strict=True)) // BLOCK)
        for layer in LAYERS:
            x = fresh * (layer + 1)
            carry, sums = self.state.read(layer, at, slots, turn, HEADS, WIDTH, units, torch.float32)
            assert carry is not None and sums is not None
            carry.write(scan(x, DECAY, seq, pos, carry.read())[1])
            place = seq * sums.shape[1] + pos // BLOCK
            sums = sums.flatten(0, 1).index_add(0, place, x).view_as(sums)
            self.state.write_sums(layer, at, turn, counts, sums)
            if fail:
                return
        for slot, rows in zip(slots, fresh.split(list(counts)), strict=True):
            self.texts[slot] += list(rows)

    def cut(self, slot: int, length: int) -> None:
        given = torch.tensor([slot]), torch.tensor([length])
        self.state.check_truncate(*given)
        self.state.truncate(*given)
        del self.texts[slot][length:]

    def check(self) -> None:
        """The state is that of one pass over each text."""
        for layer in LAYERS:
            held = self.state.layers[layer]
            assert held.mean is not None and held.sums is not None
            for slot, text in enumerate(self.texts):
                turn = self.state.turn[slot]
                assert self.state.count[slot, turn] == len(text)
                mean = torch.zeros(HEADS, WIDTH)
                sums = torch.zeros(held.sums.shape[1], HEADS, WIDTH)
                weight = torch.zeros(HEADS)
                for pos, x in enumerate(text):
                    grown = 1 + DECAY * weight
                    mean = (x * (layer + 1) + (DECAY * weight)[:, None] * mean) / grown[:, None]
                    weight = grown
                    sums[pos // BLOCK] += x * (layer + 1)
                torch.testing.assert_close(held.mean[slot, turn], mean)
                torch.testing.assert_close(held.sums[slot], sums)


def test_passes_of_any_size() -> None:
    model = Model()
    for counts in ((5, 1, 9), (1, 1, 1), (3, 0, 2), (1, 1, 0), (0, 12, 1)):
        model.read(*counts)
        model.check()
    model.read(2, 4, slots=(2, 0))
    model.check()


def test_a_slot_is_reset() -> None:
    model = Model()
    model.read(5, 6, 7)
    model.state.reset(torch.tensor([1]))
    model.texts[1] = []
    model.check()
    model.read(1, 9, 1)
    model.check()


def test_cuts_to_where_a_pass_began_or_ended() -> None:
    model = Model()
    model.read(5, 6, 7)
    model.read(6, 1, 1)
    model.read(1, 1, 1)
    model.cut(0, 11)
    model.cut(1, 6)
    model.cut(2, 9)
    model.check()
    model.cut(0, 5)
    model.read(3, 3, 3)
    model.check()
    model.cut(1, 0)
    model.check()
    model.read(1, 1, 1)
    model.check()
    before = [x.clone() for x in (model.state.count, model.state.turn)]
    for length in (1, 4, 6, 7):
        with pytest.raises(Unsupported, match=rf"cannot be cut from 9 to {length} tokens.*\(\[5, 8, 9\]\)"):
            model.cut(0, length)
    assert all(torch.equal(a, b) for a, b in zip(before, (model.state.count, model.state.turn), strict=True))


def test_as_many_passes_are_kept_as_are_promised() -> None:
    model = Model()
    for _ in range(20):
        model.read(1, 1, 1)
    model.cut(0, 20 - PASSES + 1)
    model.check()
    with pytest.raises(Unsupported, match="cannot be cut from 20 to 12"):
        model.cut(1, 20 - PASSES)


def test_a_pass_that_failed_half_way_is_undone() -> None:
    model = Model()
    model.read(5, 6, 7)
    for counts in ((3, 0, 9), (1, 1, 1)):
        model.read(*counts, fail=True)
        for slot in range(SLOTS):
            model.cut(slot, len(model.texts[slot]))
        model.check()
        model.read(2, 2, 2)
        model.check()


def test_the_first_pass_that_failed_is_undone() -> None:
    model = Model()
    model.read(5, 6, 7, fail=True)
    for slot in range(SLOTS):
        model.cut(slot, 0)
    model.read(3, 3, 3)
    model.check()


def test_cuts_to_a_snapshot() -> None:
    """As a rollback does it: cut, then restore."""
    model = Model()
    model.read(5, 6, 7)
    restore = model.state.snapshot()
    for _ in range(PASSES + 3):
        model.read(1, 2, 1)
    for slot, length in enumerate((5, 6, 7)):
        model.cut(slot, length)
    model.check()
    restore()
    model.check()
    model.read(1, 1, 1)
    model.check()
    for _ in range(PASSES):
        model.read(1, 1, 1)
    del restore
    with pytest.raises(Unsupported, match="cannot be cut"):
        model.cut(0, 5)


@pytest.mark.parametrize("how", ["cut", "reset"])
def test_a_snapshot_of_tokens_that_were_cut_is_of_no_use(how: str) -> None:
    model = Model()
    model.read(5, 6, 7)
    restore = model.state.snapshot()
    if how == "reset":
        model.state.reset(torch.tensor([0]))
        model.texts[0] = []
    else:
        model.cut(0, 0)
    for _ in range(PASSES + 3):
        model.read(1, 1, 1)  # slot 0 passes 5 tokens again, other ones
    with pytest.raises(Unsupported, match="cannot be cut"):
        model.cut(0, 2)
    model.cut(1, 6)
    model.check()
    model.cut(2, 7)
    restore()
    model.check()


def test_sums_grow_and_say_so() -> None:
    model = Model()
    model.read(5, 6, 7)
    assert model.state.generation == 0
    size = model.state.nbytes
    for _ in range(20):
        model.read(1, 1, 1)
    assert 0 < model.state.generation <= 2 * len(LAYERS) * 3 and model.state.nbytes > size
    model.check()


@pytest.mark.parametrize(("means", "block"), [(True, None), (False, BLOCK)])
def test_what_is_not_kept_is_not_there(means: bool, block: int | None) -> None:
    state = MixState(2, "cpu", means=means, block=block)
    slots = torch.arange(2)
    turn = state.begin(slots, slots, torch.zeros(2))
    carry, sums = state.read(0, slots, (0, 1), turn, HEADS, WIDTH, 1, torch.float64)
    assert (carry is None, sums is None) == (not means, block is None)
    if carry is not None:
        carry.write(carry.read())
    if sums is not None:
        state.write_sums(0, slots, turn, (1, 1), sums)
    state.check_keep(0)
    state.truncate(slots, torch.zeros(2, dtype=torch.int64))
    held: Any = state.layers[0]
    assert {x.dtype for x in held.entries()} == {torch.float64}


def test_nan_of_one_sequence_is_gone_after_a_reset() -> None:
    model = Model()
    model.read(5, 6, 7)
    for held in model.state.layers.values():
        for x in (*held.entries(), held.sums):
            assert x is not None
            x[1] = torch.nan
    model.state.reset(torch.tensor([1]))
    model.texts[1] = []
    model.read(2, 3, 4)
    model.check()


def test_an_overwriting_pass_cuts() -> None:
    model = Model()
    model.read(5, 6, 7)
    model.read(1, 1, 1)
    model.state.overwrite(torch.tensor([0]), torch.tensor([5]))
    del model.texts[0][5:]
    model.check()
    with pytest.raises(Unsupported, match="cannot be cut from 7 to 3"):
        model.state.overwrite(torch.tensor([1]), torch.tensor([3]))
