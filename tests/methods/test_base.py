"""Budgets, state, and what a method is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName
from longreach.methods.base import AttentionMethod, Outcome, attend_densely, budget, check_budget
from longreach.methods.call import LayerCall
from longreach.methods.oracle_top_k import OracleTopK
from longreach.ops import HeadShard, Partial, Spans, merge
from tests.methods.drive import LOGITS, Turn, new_cache, read_text, run, text


@pytest.mark.parametrize(
    ("amount", "length", "keys"),
    [
        (1, 1, 1),
        (7, 100, 7),
        (7, 3, 3),
        (7, 0, 0),
        (1.0, 37, 37),
        (0.3, 10, 3),
        (0.1, 30, 3),
        (0.07, 100, 7),  # 7.000000000000001 in floating point
        (0.29, 100, 29),  # 28.999999999999996
        (0.1, 31, 4),
        (0.1, 1, 1),
        (1e-6, 5, 1),
        (0.5, 0, 0),
        (0.1, 1_000_000, 100_000),
    ],
)
def test_budget(amount: float, length: int, keys: int) -> None:
    found = budget(amount, torch.tensor([length, length]))
    assert found.tolist() == [keys, keys] and found.dtype == torch.int64


def test_a_count_of_one_and_a_fraction_of_one_differ() -> None:
    assert budget(1, torch.tensor([9])).item() == 1 and budget(1.0, torch.tensor([9])).item() == 9


@pytest.mark.parametrize("amount", [1, 5, 0.01, 1.0])
def test_budgets_that_are_taken(amount: Any) -> None:
    check_budget("k", amount)


@pytest.mark.parametrize("amount", [0, -1, 0.0, 1.0001, -0.5, float("nan"), float("inf"), True, "1", None])
def test_budgets_that_are_refused(amount: Any) -> None:
    with pytest.raises(InvalidInput, match=r"k: expected a count \(int >= 1\) or a fraction"):
        check_budget("k", amount)


def test_pooled_scores_by_kernels_are_the_references() -> None:
    now = call()
    past = torch.arange(now.kv.capacity) > now.rows.pos[:, None, None]
    for lse in (None, now.attend(Spans.dense()).lse + 0.5):
        want = replace(now, impl="reference").pooled_scores(lse)
        got = replace(now, impl="triton", ran=(ran := set[str]())).pooled_scores(lse)
        torch.testing.assert_close(got.masked_fill(past, 0.0), want.masked_fill(past, 0.0))
        assert ran == {"triton"}


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_passes_that_keep_logits(impl: str) -> None:
    """The same results as passes that read keys, the sink taken once, and the report told who computed."""
    now, some = replace(call(), impl=impl, ran=(ran := set[str]())), Spans.window(4)
    want = replace(now, impl="reference", ran=set())
    dense, logits = now.attend_keeping()
    lse, alone = now.score_keys()
    assert ran == {impl}
    torch.testing.assert_close(dense.out, want.attend(Spans.dense()).out)
    for x in (dense.lse, lse):
        torch.testing.assert_close(x, want.attend(Spans.dense()).lse)
    for kept in (logits, alone):
        for sink in (True, False):
            got, plain = now.attend_values(some, kept, sink=sink), want.attend(some, sink=sink)
            torch.testing.assert_close(got.out, plain.out)
            torch.testing.assert_close(got.lse, plain.lse)
        pooled, ends = now.pooled_scores(lse, logits=kept), now.rows.pos + 1
        torch.testing.assert_close(pooled[0, :, : ends[0]], want.pooled_scores(lse)[0, :, : ends[0]])
    assert ran == {impl}


def test_an_implementation_that_only_attend_has_leaves_the_other_ops_to_auto() -> None:
    now = replace(call(), impl="sdpa_flash", ran=(ran := set[str]()))
    now.score_keys()
    assert ran == {"reference"}


def test_rows_of_a_call() -> None:
    whole = read_text(OracleTopK(), text(9, seed=1))[0].calls[2]
    some = whole.take(torch.tensor([4, 1]))
    assert some.rows.pos.tolist() == [4, 1] and some.kv is whole.kv and some.ran is whole.ran
    torch.testing.assert_close(some.attend(Spans.dense()).out, whole.attend(Spans.dense()).out[[4, 1]])


def call() -> LayerCall:
    return read_text(OracleTopK(), text(9, seed=1))[-1].calls[2]


def test_the_sink_is_taken_once() -> None:
    whole, window = call(), Spans.window(4)
    assert whole.sink_logit is not None
    without = whole.attend(window, sink=False)
    alone = Partial(torch.zeros_like(without.out), whole.sink_logit.expand_as(without.lse))
    both, want = whole.attend(window), merge(without, alone)
    torch.testing.assert_close(both.out, want.out)
    torch.testing.assert_close(both.lse, want.lse)
    assert not torch.equal(both.lse, without.lse)


def test_soft_caps_reach_attend() -> None:
    capped = replace(call(), softcap=0.5)
    assert not torch.allclose(capped.attend(Spans.dense()).lse, call().attend(Spans.dense()).lse)


def test_sums_over_ranks() -> None:
    x = torch.ones(3)
    assert torch.equal(replace(call(), shard=None).sum_over_ranks(x), x)
    assert torch.equal(replace(call(), shard=HeadShard(2, 2, 4, lambda t: 2 * t)).sum_over_ranks(x), 2 * x)


def test_dense_attention_says_why() -> None:
    outcome = attend_densely(call(), "too short")
    assert outcome.dense_reason == "too short" and call.meter.keys == call.meter.values == (Spans.dense(),)
    assert attend_densely(call()).dense_reason is None


@dataclass(frozen=True)
class Remembers(AttentionMethod):
    """Counts the tokens of each slot."""

    size: int = 1

    name = "remembers"
    phases = ("prefill", "decode")

    def run(self, call: LayerCall, state: Any) -> Outcome:
        state.tokens[call.slots] += torch.bincount(call.rows.seq, minlength=call.slots.shape[0])
        return attend_densely(call)

    def new_state(self, call: LayerCall, slots: int) -> Counts:
        return Counts(slots)


class Counts:
    def __init__(self, slots: int):
        self.tokens = torch.zeros(slots, dtype=torch.int64)

    def reset(self, slots: Tensor) -> None:
        self.tokens[slots] = 0

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        assert bool((lengths <= self.tokens[slots]).all())

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        self.tokens[slots] = lengths


def test_state_belongs_to_the_cache_and_is_found_by_slot() -> None:
    cache, other = new_cache(slots=4), new_cache(slots=4)
    one, two = text(9, seed=1), text(9, seed=2)
    run(cache, Remembers(), [Turn(one, 3, 5), Turn(two, 1, 2)])
    run(cache, Remembers(), [Turn(two, 1, 4), Turn(one, 3, 1)])
    run(other, Remembers(), [Turn(one, 0, 2)])
    assert len(cache.state) == len(LOGITS)
    assert all(state.tokens.tolist() == [0, 6, 0, 6] for state in cache.state.values())  # type: ignore[attr-defined]
    assert all(state.tokens.tolist() == [2, 0, 0, 0] for state in other.state.values())  # type: ignore[attr-defined]
    cache.reset([1])
    cache.truncate([3], [4])
    assert all(state.tokens.tolist() == [0, 0, 0, 4] for state in cache.state.values())  # type: ignore[attr-defined]


def test_state_is_made_once_for_each_layer_and_configuration() -> None:
    cache, mine = new_cache(slots=2), call()
    state = state_of(Remembers(), cache, mine)
    assert state is state_of(Remembers(), cache, mine) and state is not None
    assert state is not state_of(Remembers(), cache, replace(mine, layer=0))
    assert state is not state_of(Remembers(size=2), cache, mine)
    before = dict(cache.state)
    assert state_of(OracleTopK(), cache, mine) is None and cache.state == before


def test_state_made_in_inference_mode_serves_outside() -> None:
    cache = new_cache()
    with torch.inference_mode():
        run(cache, Remembers(), [Turn(text(9), 0, 5)])
    run(cache, Remembers(), [Turn(text(9), 0, 1)])
    assert {int(state.tokens[0]) for state in cache.state.values()} == {6}  # type: ignore[attr-defined]


def test_options() -> None:
    assert Remembers.options() == {"size": 1} and Remembers.make(size=3) == Remembers(3)
    assert Remembers(3).to_json() == {"name": "remembers", "size": 3}
    with pytest.raises(UnknownName, match="unknown option of remembers 'length'; known: size"):
        Remembers.make(length=3)
    assert OracleTopK.make(dense_layers=[0, 2]).to_json()["dense_layers"] == (0, 2)


def test_methods_are_frozen() -> None:
    with pytest.raises(AttributeError):
        OracleTopK().k = 3  # type: ignore[misc]
