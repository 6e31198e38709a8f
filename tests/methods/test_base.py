"""Budgets, state, and what a method is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.cache import KVCache, StatelessOnTruncate
from longreach.errors import InvalidInput, SelectionError, UnknownName, Unsupported
from longreach.methods.base import AttentionMethod, Outcome, attend_densely, budget, check_budget
from longreach.methods.call import LayerCall
from longreach.methods.oracle_top_k import OracleTopK
from longreach.ops import HeadShard, KVView, Lists, Partial, Span, Spans, absolute, merge, relative
from longreach.ops.impl import compiles
from longreach.runtime import StateStore
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
    """Pooled scores by Triton from kept logits, and by the reference from keys: the same."""
    now = call()
    past = torch.arange(now.kv.capacity) > now.rows.pos[:, None, None]
    dense = now.attend(Spans.dense()).lse
    for lse in (dense, dense + 0.5):
        want = replace(now.observer(), impl="reference").op("pooled_scores", lse=lse)
        got = replace(now.observer(), impl="triton")
        logits = got.op("score_keys")[1]
        found = got.op("pooled_scores", lse=lse, logits=logits)
        torch.testing.assert_close(found.masked_fill(past, 0.0), want.masked_fill(past, 0.0))
        assert got.meter.kernels_used == {"triton"}


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_passes_that_keep_logits(impl: str) -> None:
    """The same results as passes that read keys, the sink taken once; the meter has who computed and what was read."""
    now, some = replace(call().observer(), impl=impl), Spans.window(4)
    want = replace(now.observer(), impl="reference")
    dense, logits = now.op("attend_with_logits")
    lse, alone = now.op("score_keys")
    assert now.meter.kernels_used == {impl}
    assert now.meter.keys == (Spans.dense(),) * 2 and now.meter.values == (Spans.dense(),)
    torch.testing.assert_close(dense.out, want.attend(Spans.dense()).out)
    for x in (dense.lse, lse):
        torch.testing.assert_close(x, want.attend(Spans.dense()).lse)
    for kept in (logits, alone):
        got, plain = now.op("attend_from_logits", some, kept), want.attend(some)
        torch.testing.assert_close(got.out, plain.out)
        torch.testing.assert_close(got.lse, plain.lse)
        pooled, ends = now.op("pooled_scores", lse=lse, logits=kept), now.rows.pos + 1
        known = want.op("pooled_scores", lse=lse)
        torch.testing.assert_close(pooled[0, :, : ends[0]], known[0, :, : ends[0]])
    assert now.meter.kernels_used == {impl}
    assert now.meter.keys == (Spans.dense(),) * 2, "kept logits spare the keys"
    assert now.meter.values == (Spans.dense(), some, some)


def test_an_implementation_that_only_attend_has_leaves_the_other_ops_to_auto() -> None:
    now = replace(call().observer(), impl="sdpa_flash")
    now.op("score_keys")
    auto = "numba" if compiles(torch.device("cpu")) else "reference"
    assert now.meter.kernels_used == {auto} and now.computes("top_k", auto)


def test_an_unknown_op_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown op 'guess'; known: .*score_keys"):
        call().op("guess")


def test_a_view_on_another_device_is_refused() -> None:
    now = call()
    far = KVView(*(x.to("meta") for x in (now.kv.k, now.kv.v, now.kv.seq_lens)))
    with pytest.raises(InvalidInput, match=r"kv: expected a view on cpu like the rows, got .* on meta"):
        now.attend(Spans.dense(), kv=far)
    with pytest.raises(InvalidInput, match="kv: expected a view on cpu"):
        now.op("score_keys", kv=far)


def test_memory_of_other_heads_or_sequences_is_refused() -> None:
    """Rows would read heads that are not theirs, or a sequence that the pass has not."""
    now, kv = call(), call().kv
    wide = replace(kv, k=kv.k.repeat(1, 2, 1, 1), v=kv.v.repeat(1, 2, 1, 1))
    many = replace(kv, seq_lens=kv.seq_lens.repeat(2), block_table=torch.zeros(2, 1, dtype=torch.int64))
    heads, sequences = kv.heads, kv.sequences
    for other, got in ((wide, f"{2 * heads} and {sequences}"), (many, f"{heads} and {2 * sequences}")):
        expected = f"kv: expected a view of {heads} KV heads and {sequences} sequences like the layer's, got {got}"
        with pytest.raises(InvalidInput, match=expected):
            now.attend(Spans.dense(), kv=other)
    nothing: Any = kv.k
    for read in (lambda: now.attend(Spans.dense(), kv=nothing), lambda: now.op("score_keys", kv=nothing)):
        with pytest.raises(InvalidInput, match=r"kv: expected a KVView, got float32\["):
            read()


@pytest.mark.parametrize("amount", [1.5, True, -1, None, torch.ones(1), torch.ones(2, dtype=torch.int64)], ids=repr)
def test_only_whole_bytes_are_counted(amount: Any) -> None:
    now = call().observer()
    with pytest.raises(InvalidInput, match=r"amount: expected .*int .*R=1\].* got "):
        now.read_bytes(amount)
    assert now.meter.noted == []


def test_a_selection_of_another_cache_is_refused() -> None:
    """Its lists are of other rows, or name slots that this view has not."""
    now = call()
    rows, heads = now.rows.pos.shape[0] + 1, now.kv.heads
    other = Lists(torch.zeros(rows, heads, 1, dtype=torch.int64), torch.ones(rows, heads, dtype=torch.int64))
    now = now.observer()
    with pytest.raises(InvalidInput, match="lists: expected one per row"):
        now.attend(other)
    beyond = Lists(torch.full((1, heads, 1), 99), torch.ones(1, heads, dtype=torch.int64))
    with pytest.raises(SelectionError, match="list entry 99 lies outside"):
        now.attend(beyond)
    assert now.meter.noted == [], "what failed was not read"


def test_another_view_is_read_and_counted() -> None:
    """Halves of the keys in two views merge to the whole, and each counts."""
    now = call().observer()
    n = int(now.kv.seq_lens[0])
    first, rest = KVView(now.kv.k, now.kv.v, now.kv.seq_lens.clamp(max=3)), now.kv
    both = merge(
        now.attend(Spans.dense(), kv=first, sink=False), now.attend(Spans((Span(absolute(3), relative(1)),)), kv=rest)
    )
    torch.testing.assert_close(both.out, call().attend(Spans.dense()).out)
    counted = [int(m.read.selection.keys_read(m.rows, m.kv)[0, 0]) for m in now.meter.noted if m.read.selection]
    assert counted == [3, n - 3]


def test_a_view_with_positions_of_its_own_is_refused() -> None:
    now = call()
    view = replace(now.kv, slot_pos=torch.zeros(now.kv.k.shape[:3], dtype=torch.int64))
    with pytest.raises(Unsupported, match="read in the order of its slots"):
        replace(now, kv=view)


def test_values_made_once_a_pass() -> None:
    now, made = replace(call(), shared={}), []
    for layer in range(3):
        assert replace(now, layer=layer).once("it", lambda: made.append(1) or 7) == 7
    other = replace(now.rows, pos=now.rows.pos.clone())
    assert replace(now, rows=other).once("it", lambda: made.append(1) or 8) == 8, "rows in other slots"
    assert len(made) == 2


def test_rows_of_a_call() -> None:
    whole = read_text(OracleTopK(), text(9, seed=1))[0].calls[2]
    some = whole.take(torch.tensor([4, 1]))
    assert some.rows.pos.tolist() == [4, 1] and some.kv is whole.kv and some.meter is whole.meter
    assert some.index is not None and whole.take(torch.tensor([4, 1])).take(torch.tensor([1])).index.tolist() == [1]  # type: ignore[union-attr]
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
    now = call().observer()
    outcome = attend_densely(now, "too short")
    assert outcome.dense_reason == "too short" and now.meter.keys == now.meter.values == (Spans.dense(),)
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


class Counts(StatelessOnTruncate):
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
    assert len(counts(cache)) == len(LOGITS)
    assert all(tokens == [0, 6, 0, 6] for tokens in counts(cache))
    assert all(tokens == [2, 0, 0, 0] for tokens in counts(other))
    cache.reset([1])
    cache.truncate([3], [4])
    assert all(tokens == [0, 0, 0, 4] for tokens in counts(cache))


def counts(cache: KVCache) -> list[list[int]]:
    assert isinstance(cache.state, StateStore)
    return [state.tokens.tolist() for state in cache.state.states()]  # type: ignore[attr-defined]


def test_state_is_made_once_for_each_layer_and_configuration() -> None:
    store, mine = StateStore(2), call()
    state = store.get(Remembers(), mine)
    assert state is store.get(Remembers(), mine) and state is not None
    assert state is not store.get(Remembers(), replace(mine, layer=0))
    assert state is not store.get(Remembers(size=2), mine)
    assert store.get(OracleTopK(), mine) is None and len(store.states()) == 3
    assert len(store.states([Remembers()])) == 2 and len(store.states(layer=0)) == 1


def test_state_made_in_inference_mode_serves_outside() -> None:
    cache = new_cache()
    with torch.inference_mode():
        run(cache, Remembers(), [Turn(text(9), 0, 5)])
    run(cache, Remembers(), [Turn(text(9), 0, 1)])
    assert [tokens[0] for tokens in counts(cache)] == [6] * len(LOGITS)


def test_options() -> None:
    assert Remembers.options() == {"size": 1} and Remembers.make(size=3) == Remembers(3)
    assert Remembers(3).to_json() == {"name": "remembers", "size": 3}
    with pytest.raises(UnknownName, match="unknown option of remembers 'length'; known: size"):
        Remembers.make(length=3)
    assert OracleTopK.make(dense_layers=[0, 2]).to_json()["dense_layers"] == (0, 2)


def test_methods_are_frozen() -> None:
    with pytest.raises(AttributeError):
        OracleTopK().k = 3  # type: ignore[misc]
