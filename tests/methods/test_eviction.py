"""SnapKV: votes by the definition, what stays in any case, and the memory that goes back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName
from longreach.methods.call import LayerCall
from longreach.methods.registry import choose_eviction
from longreach.methods.slots import LastRows, PromptEnd
from longreach.methods.snapkv import SnapKV
from longreach.ops import KVView, RowRange, Rows
from longreach.testing.inputs import random_kv
from tests.ops.attend.kernels import here

H, G, D = 4, 2, 16


def rows_at(pos: list[int], seq: int = 0) -> Rows:
    return Rows(torch.randn(len(pos), H, D), torch.full((len(pos),), seq), torch.tensor(pos, dtype=torch.int64))


def call_of(rows: Rows, kv: KVView, **more: Any) -> LayerCall:
    return LayerCall(0, rows, kv, torch.arange(len(kv.seq_lens)), 0.25, **more)


def votes(rows: Rows, kv: KVView, seq: int, length: int) -> Tensor:
    """fp64 [G, N], from the definition."""
    found = torch.zeros(G, length, dtype=torch.float64)
    slots = torch.arange(length)
    page, offset = kv.locate(torch.full_like(slots, seq), slots)
    for r in range(len(rows.pos)):
        for h in range(H):
            x = kv.k[page, h // (H // G), offset].double() @ rows.q[r, h].double() * 0.25
            x[slots > rows.pos[r]] = -torch.inf
            found[h // (H // G)] += x.softmax(0)
    return found


def end_of(slot: int, length: int, first: int, last: int, pos: Sequence[int]) -> PromptEnd:
    return PromptEnd(slot, length, first, last, tuple(enumerate(pos)))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("page", [None, 16])
def test_the_best_by_votes_stay(impl: str, pool: Any, page: int | None) -> None:
    """Ragged prompts with parts of other lengths, chosen together."""
    kv, first, capacity = random_kv([31, 60, 44], page=page), 4, 21
    parts = {1: (60, 6, range(54, 60)), 2: (44, 3, range(41, 44)), 0: (31, 6, range(25, 31))}  # slot -> length, last
    each = [rows_at(list(pos), seq=slot) for slot, (_, _, pos) in parts.items()]
    rows = Rows(*(torch.cat([getattr(x, name) for x in each]) for name in ("q", "seq", "pos")))
    method = SnapKV(capacity=capacity, kernel=5, pool=pool, window=6)
    prompts = [end_of(slot, length, first, last, pos) for slot, (length, last, pos) in parts.items()]
    kept = method.keep(call_of(here(rows), here(kv), impl=impl), prompts)
    for (slot, (length, last, _)), mine, found in zip(parts.items(), each, kept, strict=True):
        assert found.shape == (G, capacity) and found.dtype == torch.int64 and bool((found.diff(dim=1) > 0).all())
        scores = votes(mine, kv, slot, length)
        pooled = torch.stack([
            torch.stack([
                near.max() if pool == "max" else near.mean() for n in range(first, length - last)
                for near in [scores[g, max(first, n - 2) : min(length - last, n + 3)]]
            ]) for g in range(G)
        ])  # fmt: skip
        for g in range(G):
            free = pooled[g]  # votes for what stays in any case do not pull their neighbours along
            want = {*range(first), *range(length - last, length)}
            order = free.sort(descending=True, stable=True).indices
            want |= {first + int(n) for n in order[: capacity - first - last]}
            assert set(found[g].tolist()) == want


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_of_equal_votes_the_older_key_stays(impl: str) -> None:
    kv = random_kv([40])
    kv.k.zero_()  # all visible keys get the same vote
    rows = rows_at([39])
    (kept,) = SnapKV(capacity=12, kernel=3, window=1).keep(
        call_of(here(rows), here(kv), impl=impl), [end_of(0, 40, 2, 1, [39])]
    )
    assert kept.tolist() == [[*range(11), 39]] * G


def test_prompts_are_chosen_for_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As their logits grow; which keys are kept does not depend on it."""
    lengths, calls = [40, 10, 33, 40], list[int]()
    kv, method = random_kv(lengths), SnapKV(capacity=12, window=4)
    state = method.new_state(call_of(rows_at([0]), kv), len(lengths))
    for slot, length in enumerate(lengths):
        rows = rows_at(list(range(length - 4, length)), slot)
        state.note(call_of(rows, kv))

    def chosen() -> dict[int, Tensor]:
        calls.clear()
        return method.kept(state, kv, range(4), lengths, 2)

    keep = SnapKV.keep
    monkeypatch.setattr(SnapKV, "keep", lambda *args: (calls.append(len(args[2])), keep(*args))[1])
    whole = chosen()
    assert calls == [3] and list(whole) == [0, 2, 3], "a sequence that keeps all is left out"
    monkeypatch.setattr("longreach.methods.slots.LOGIT_BYTES", 2 * 4 * 4 * H * kv.capacity)
    halves = chosen()
    assert calls == [2, 1] and all(torch.equal(whole[slot], halves[slot]) for slot in whole)
    monkeypatch.setattr("longreach.methods.slots.LOGIT_BYTES", 1)
    assert chosen().keys() == whole.keys() and calls == [1, 1, 1]


def test_a_short_prompt_keeps_all_and_a_small_capacity_is_refused() -> None:
    kv, rows = random_kv([20]), rows_at(list(range(14, 20)))
    state = LastRows(call_of(rows, kv), 6, 1)
    state.note(call_of(rows, kv))
    assert SnapKV(capacity=20, window=6).kept(state, kv, [0], [20], 0) == {}
    with pytest.raises(InvalidInput, match="capacity 9 is less than the 11 tokens that stay, 5 at"):
        SnapKV(capacity=9, window=6).kept(state, kv, [0], [20], 5)


def noted(state: LastRows, slot: int, length: int, last: int = 8) -> Rows:
    return state.rows([(slot, state.noted(state.pos[slot].tolist(), length, last))])


def test_rows_of_a_pass_in_any_order_take_one_place_each() -> None:
    """The newest first: a row before the window must not take the place of the one that it is `size` rows behind."""
    rows = rows_at(list(range(20))[::-1])
    state = LastRows(call_of(rows, random_kv([20])), 8, 1)
    state.note(call_of(rows, random_kv([20])))
    got = noted(state, 0, 20)
    assert got.pos.tolist() == list(range(12, 20)) and torch.equal(got.q, rows.q[:8].flip(0))
    assert noted(state, 0, 20, 3).pos.tolist() == [17, 18, 19]


@pytest.mark.parametrize("known", [True, False])
def test_the_last_rows_are_those_of_several_passes(known: bool) -> None:
    """Ragged, packed, in slots out of order; passes shorter and longer than the window."""
    size, state = 8, None
    want: dict[int, dict[int, Tensor]] = {2: {}, 0: {}}
    lengths = {2: 0, 0: 0}
    for counts in ((5, 19), (2, 0), (30, 3), (1, 1)):
        parts = []
        for (slot, n), seq in zip(zip((2, 0), counts, strict=True), (0, 1), strict=True):
            part = rows_at(list(range(lengths[slot], lengths[slot] + n)), seq)
            want[slot] |= dict(zip(part.pos.tolist(), part.q, strict=True))
            lengths[slot] += n
            parts.append(part)
        runs = tuple(RowRange(n, seq) for seq, n in enumerate(counts)) if known else None
        rows = Rows(*(torch.cat([getattr(p, name) for p in parts]) for name in ("q", "seq", "pos")), runs=runs)
        kv = random_kv([lengths[2], lengths[0]])
        call = LayerCall(0, rows, kv, torch.tensor([2, 0]), 0.25)
        state = state or SnapKV(window=size).new_state(call, 3)
        SnapKV(window=size).observe_prompt(call, state)
    assert state is not None
    for slot in (2, 0):
        got = noted(state, slot, lengths[slot])
        by_pos = dict(zip(got.pos.tolist(), got.q, strict=True))
        assert sorted(by_pos) == list(range(lengths[slot] - size, lengths[slot]))
        assert all(torch.equal(by_pos[p], want[slot][p]) for p in by_pos) and set(got.seq.tolist()) == {slot}
    state.truncate(torch.tensor([0]), torch.tensor([lengths[0] - 3]))
    assert sorted(noted(state, 0, lengths[0] - 3).pos.tolist()) == list(range(lengths[0] - 8, lengths[0] - 3))
    state.reset(torch.tensor([0]))
    assert not len(noted(state, 0, lengths[0]).pos) and len(noted(state, 2, lengths[2]).pos) == size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity: expected a count >= 1, got 0"),
        ({"capacity": 0.5}, "capacity: expected a count >= 1"),
        ({"window": 0}, "window: expected a count >= 1"),
        ({"kernel": 4}, "kernel: expected an odd number of neighbours, got 4"),
        ({"pool": "median"}, "pool: expected 'max' or 'mean', got 'median'"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SnapKV(**options)


def test_it_is_found_by_name() -> None:
    assert choose_eviction("snapkv", capacity=7) == SnapKV(capacity=7)
    assert choose_eviction(None) is choose_eviction("none") is None
    with pytest.raises(UnknownName, match="unknown evict method 'h2o'; known: none, snapkv"):
        choose_eviction("h2o")
    with pytest.raises(UnknownName, match="option of snapkv"):
        choose_eviction("snapkv", size=3)
    assert SnapKV(capacity=7).to_json() == {"name": "snapkv", "window": 32, "capacity": 7, "kernel": 7, "pool": "max"}


def test_last_rows_hold_nothing_else_of_a_pass() -> None:
    """Queries and keys before rotation are as large as the pass, in each layer."""
    whole = torch.randn(3, H, D)
    rows, held = rows_at([0, 1, 2]), weakref.ref(whole)

    more = {"pre_rope": partial(torch.split, whole, 1), "shared": {"scores": whole}, "index": torch.arange(3)}
    call = call_of(rows, random_kv([3]), **more)
    state = SnapKV().new_state(call, 2)
    assert isinstance(state, LastRows)
    state.note(call)
    queries = weakref.ref(rows.q)
    del call, rows, more, whole
    gc.collect()
    assert held() is None and queries() is None
