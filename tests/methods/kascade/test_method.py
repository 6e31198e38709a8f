"""Options, plans that do not fit, layers whose anchor did not choose, head maps that are used, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, Unsupported
from longreach.methods import call as call_module
from longreach.methods.call import LayerCall
from longreach.methods.kascade import Kascade
from longreach.methods.kascade.method import AnchorSelection
from longreach.methods.kascade.plan import KascadePlan
from longreach.methods.kascade.role import role_of
from longreach.ops import HeadShard, KVView, Lists, Logits, Partial, Rows, Spans
from longreach.ops.doors import Op, op_named
from longreach.plans import load
from longreach.runtime import Ledger
from longreach.testing.tolerance import assert_close
from tests.methods import test_contract as contract
from tests.methods.drive import (
    CACHES,
    DIM,
    HEADS,
    KV_HEADS,
    MODEL,
    SCALE,
    Turn,
    exact,
    new_cache,
    outputs,
    read_text,
    run,
    text,
)
from tests.methods.kascade.planned import planned
from tests.methods.metered import metadata_of, passes_of
from tests.tiers import swept

MAPS = [{1: (1, 0)}, {1: (1, 0), 2: (1, 1)}, {2: (0, 0)}]


# options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": 128}, "sinks \\+ recent: expected at most 128, .* got 128 and 1"),
        ({"sinks": 3, "recent": 4, "min_keys": 6}, "at most 6, .* got 3 and 4"),
        ({"k": 7, "sinks": 7, "min_keys": 100}, "at most 7, .* got 7 and 1"),
    ],
)
def test_what_is_forced_must_fit_into_the_fewest_keys(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Kascade(**options)


def test_what_just_fits_is_taken() -> None:
    assert Kascade(sinks=127).sinks == 127 and Kascade(k=1).recent == 1


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, {1: 1, 127: 127, 128: 128, 1279: 128, 1280: 128, 1290: 129, 131072: 13107}),
        ({"k": 0.29, "min_keys": 1}, {1: 1, 3: 1, 10: 2, 100: 29}),  # 0.29 * 100 is 28.999999999999996
        ({"k": 0.07, "min_keys": 1}, {100: 7, 99: 6}),
        ({"k": 9}, {5: 5, 9: 9, 10_000: 9}),
        ({"k": 1.0}, {1: 1, 131072: 131072}),
        ({"k": 3, "dense_below": 50}, {2: 2, 49: 49, 50: 3, 51: 3}),
    ],
)
def test_how_many_keys(options: dict[str, Any], counts: dict[int, int]) -> None:
    budget, lengths = Kascade(**options).budget, torch.tensor(list(counts))
    assert budget.keys(lengths, lengths).tolist() == list(counts.values())
    for length in counts:
        all_shorter = torch.arange(1, min(length, 2000) + 1)
        most = max(int(budget.keys(all_shorter, all_shorter).max()), counts[length])
        assert budget.max_keys(length) == most


# plans


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    other = planned(tmp_path, model=replace(MODEL, config="another"))
    with pytest.raises(InvalidInput, match="is for a model, and this is another model: hash of the configuration"):
        Kascade(other).check(MODEL)
    wider = planned(tmp_path, model=replace(MODEL, kv_heads=4))
    with pytest.raises(InvalidInput, match="kv heads 4 expected, 2 came"):
        Kascade(wider).check(MODEL)
    with pytest.raises(InvalidInput, match=r"no plan 'nowhere\.json'"):
        Kascade("nowhere.json").check(MODEL)
    with pytest.raises(InvalidInput, match=r"no kascade plan is shipped for this model .*longreach calibrate kascade"):
        Kascade().check(replace(MODEL, config="another"))
    Kascade().check(MODEL)


def test_dense_layers_must_be_the_models(tmp_path: Path) -> None:
    Kascade(planned(tmp_path), dense_layers=(0, 2)).check(MODEL)
    with pytest.raises(InvalidInput, match=r"dense_layers: .* has 3 \(0 to 2\), got layer 3"):
        Kascade(planned(tmp_path), dense_layers=(3,)).check(MODEL)


def test_the_model_must_be_told(tmp_path: Path) -> None:
    call = replace(read_text(Kascade(planned(tmp_path)), text(9))[-1].calls[0], model=None)
    with pytest.raises(InvalidInput, match=r"LayerCall\.model is required: Kascade looks up its plan by model"):
        Kascade(planned(tmp_path)).run(call, None)


# layers


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_layer_whose_anchor_did_not_choose_names_both(phase: Any, tmp_path: Path) -> None:
    """Its anchor attends to a window in this model, or another method took its place."""
    method = Kascade(planned(tmp_path, anchors=(0, 1)), min_keys=2)
    calls = read_text(method, text(20))[0 if phase == "prefill" else -1].calls
    none = "layer 2 reuses the keys that layer 1 chooses, and that layer chose none in this pass"
    with pytest.raises(InvalidInput, match=none):
        method.run(replace(calls[2], shared={}), None)
    shared: dict[Any, Any] = {}
    method.run(replace(calls[0], shared=shared), None)
    with pytest.raises(InvalidInput, match="layer 2 reuses the keys that layer 1 chooses"):
        method.run(replace(calls[2], shared=shared), None)


def test_a_layer_that_takes_no_part_is_refused(tmp_path: Path) -> None:
    """It had a sliding window when the plan was made."""
    method = Kascade(planned(tmp_path, anchors=(0,), layers=(0, 2)), min_keys=2)
    with pytest.raises(InvalidInput, match="layer 1 attends to its whole context, and takes no part in the plan"):
        read_text(method, text(20))


def test_dense_layers_say_so_and_choose_all_the_same(tmp_path: Path) -> None:
    plan = planned(tmp_path, anchors=(0, 1), head_map={2: (1, 0)})
    plain, method = Kascade(plan, k=3), Kascade(plan, k=3, dense_layers=(1,))
    for want, found in zip(read_text(plain, text(30)), read_text(method, text(30)), strict=True):
        assert [o.dense_reason for o in want.outcomes] == ["first anchor", None, None]
        assert [o.dense_reason for o in found.outcomes] == ["first anchor", "in dense_layers", None]
        assert_close(found.outcomes[1].partial, exact(found.calls[1]))
        assert torch.equal(found.outcomes[2].partial.out, want.outcomes[2].partial.out)
    reuse = read_text(Kascade(plan, k=3, dense_layers=(2,)), text(30))[-1]
    assert reuse.outcomes[2].dense_reason == "in dense_layers"
    assert_close(reuse.outcomes[2].partial, exact(reuse.calls[2]))


# heads


@pytest.mark.parametrize("heads", swept(MAPS, 1), ids=str)
def test_the_head_map_decides_what_is_read(heads: Any, tmp_path: Path) -> None:
    """Another map, other results; and what the map leaves out may hold anything (the contract's poison)."""
    method = Kascade(planned(tmp_path, (0,), heads), k=4)
    straight = Kascade(planned(tmp_path, (0,)), k=4)
    found, want = outputs(read_text(method, text(50))), outputs(read_text(straight, text(50)))
    for layer in range(3):
        assert torch.equal(found[layer], want[layer]) == (layer not in heads)
    for config in CACHES.values():
        contract.test_what_the_report_calls_unread_is_unread(method, config)
        contract.test_what_the_report_calls_read_is_read(method, config)
        contract.test_bytes_are_those_of_the_slots_read(method, config)


def test_a_map_within_each_rank_is_taken_and_one_across_is_refused(tmp_path: Path) -> None:
    def plan(*row: int) -> KascadePlan:
        shape = replace(MODEL, query_heads=8, kv_heads=4)
        return KascadePlan.of(load(planned(tmp_path, (0,), {2: row}, model=shape), "kascade"))

    def role(plan: KascadePlan, shard: HeadShard, layer: int = 2, mapped: bool = True) -> Any:
        return role_of(plan, layer, mapped=mapped, dense_layers=(), shard=shard, device=torch.device("cpu"))

    inside, across = plan(1, 1, 3, 2), plan(0, 2, 2, 3)
    assert role(inside, HeadShard(0, 4, 4)).head_map.tolist() == [1, 1, 3, 2]
    assert role(inside, HeadShard(0, 2, 4)).head_map.tolist() == [1, 1]
    assert role(inside, HeadShard(2, 2, 4)).head_map.tolist() == [1, 0]
    assert role(inside, HeadShard(0, 2, 4), layer=1).head_map is None
    for shard in (HeadShard(0, 2, 4), HeadShard(2, 2, 4)):
        for layer in range(3):  # every rank in every layer, so that none waits for another
            with pytest.raises(Unsupported, match=r"head 1 of layer 2 would need .* head 2 of layer 0 .*heads='all'"):
                role(across, shard, layer)
        assert role(across, shard, mapped=False).head_map is None
    assert role(across, HeadShard(0, 4, 4)).head_map.tolist() == [0, 2, 2, 3]


# lengths


def test_each_row_of_a_batch_is_dense_below_its_length(tmp_path: Path) -> None:
    """Contexts of 19 and 20 in one pass; the device decides, row by row."""
    method = Kascade(planned(tmp_path), k=4, dense_below=20)
    cache, texts = new_cache(CacheConfig("paged", page=4), slots=2), [text(n, seed=n) for n in (19, 20)]
    run(cache, method, [Turn(texts[0], 0, 18), Turn(texts[1], 1, 19)])
    last = run(cache, method, [Turn(texts[0], 0), Turn(texts[1], 1)])
    for call, outcome in zip(last.calls[1:], last.outcomes[1:], strict=True):
        lists = call.meter.values[-1]
        assert isinstance(lists, Lists) and lists.count.tolist() == [[19, 19], [4, 4]]
        assert not lists.overflowed.any()
        dense = exact(call)
        assert_close(outcome.partial, exact(call, lists))
        error = (outcome.partial.out.double() - dense.out).abs().amax((1, 2))
        assert error[0] < 1e-5 and error[1] > 1e-2


def test_the_plan_has_the_break_even_of_this_device(tmp_path: Path) -> None:
    """Where the cache has room for fewer tokens, no keys are chosen; a number given as option is taken instead."""
    plan = planned(tmp_path, dense_below={"decode": 41, "prefill": 22})
    short = "fewer than {} tokens, dense is faster on cpu (plan)"
    for options, prompts, steps in (
        ({}, (short.format(22), 24), short.format(41)),
        ({"dense_below": 0}, None, None),
        ({"dense_below": 42}, None, "fewer than 42 tokens (dense_below)"),
    ):
        done = read_text(Kascade(plan, k=3, **options), text(40), cache=new_cache(CacheConfig(capacity=40)))
        if options != {"dense_below": 42}:
            assert [o.partly_dense for o in done[0].outcomes] == [None, prompts, prompts]
        for turn in done[1:]:
            assert [o.dense_reason for o in turn.outcomes] == ["first anchor", steps, steps]
            if steps:
                for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
                    assert_close(outcome.partial, exact(call))
                    assert not any(isinstance(lists, Lists) for lists in call.meter.values)


def test_a_larger_cache_gives_the_same_answer_below_the_break_even(tmp_path: Path) -> None:
    plan = planned(tmp_path, dense_below={"decode": 39})
    small, large = (
        outputs(read_text(Kascade(plan, k=3), text(38), cache=new_cache(CacheConfig(capacity=n)))) for n in (38, 80)
    )
    torch.testing.assert_close(small, large, rtol=0, atol=2e-5)


@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
def test_k_larger_than_the_length_is_everything(config: CacheConfig, tmp_path: Path) -> None:
    for turn in read_text(Kascade(planned(tmp_path), k=1000), text(25), cache=new_cache(config)):
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            assert_close(outcome.partial, exact(call))
            for selection in call.meter.values:
                if isinstance(selection, Lists):
                    assert selection.index.shape[2] <= call.kv.capacity


def test_lists_have_room_for_all_that_the_cache_can_come_to_hold(tmp_path: Path) -> None:
    """Their size depends on the capacity alone, so that a captured step holds as contexts grow; counts do not."""
    method, whole = Kascade(planned(tmp_path), k=0.25, min_keys=2), text(60)
    counts, sizes = [], set()
    for turn in read_text(method, whole, steps=40, cache=new_cache(CacheConfig(capacity=64))):
        lists = turn.calls[2].meter.values[0]
        if turn.calls[0].phase == "decode":
            assert isinstance(lists, Lists)
            sizes.add(lists.index.shape)
            counts.append(int(lists.count[0, 0]))
    assert sizes == {(1, KV_HEADS, 16)} and counts == [n // 4 for n in range(21, 61)]


def test_several_new_tokens_of_a_sequence_choose_each_for_themselves(tmp_path: Path) -> None:
    method, whole = Kascade(planned(tmp_path, head_map={2: (1, 0)}), k=0.2, min_keys=2), text(40)
    want = outputs(read_text(method, whole, chunks=[30], steps=4)[1:])
    cache = new_cache()
    run(cache, method, [Turn(whole, 0, 30)])
    found = run(cache, method, [Turn(whole, 0, 4)], phase="decode")
    torch.testing.assert_close(found.outs(0), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"heads": "all", "dense_below": 9}, {"k": 7, "sinks": 1}, {"scoring": "int8"}])
def test_decoding_needs_no_value_from_the_device(options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have none: whatever waits for the device would raise. The ops are held to it by their own tests."""
    batch, capacity = 3, 40

    kept = torch.empty(batch, HEADS), Logits(torch.empty(batch, KV_HEADS, capacity, HEADS // KV_HEADS))

    def of(name: str, **replaced: Any) -> Op:
        return replace(op_named(name), **replaced)

    def attended(*given: Any, **more: Any) -> Partial:
        return Partial.empty(batch, HEADS, DIM)

    def listed(x: torch.Tensor, count: torch.Tensor, *given: Any, capacity: int, **more: Any) -> Any:
        return torch.empty(*x.shape[:2], capacity, dtype=torch.int32), count.int()

    ops = {
        "score_keys": of("score_keys", run=lambda *a, **b: kept),
        "attend_with_logits": of("attend_with_logits", run=lambda *a, **b: (attended(), kept[1])),
        "pooled_scores": of("pooled_scores", run=lambda *a, **b: torch.empty(batch, KV_HEADS, capacity)),
        "top_k": of("top_k", run=listed),
        "attend_from_logits": of("attend_from_logits", run=attended),
    }
    monkeypatch.setattr(call_module, "op_named", ops.__getitem__)
    monkeypatch.setattr(call_module, "prepare", lambda *a, **b: attended)
    method, ledger = Kascade(planned(tmp_path, (0, 2), {1: (1, 1)}), **options), Ledger()
    with FakeTensorMode():
        memory, ints = torch.empty(batch, KV_HEADS, capacity, DIM), torch.ones(batch, dtype=torch.int64)
        rows, kv = Rows(torch.empty(batch, HEADS, DIM), ints, ints), KVView(memory, memory, ints, ints[:, None])
        first = LayerCall(0, rows, kv, ints, SCALE, model=MODEL)
        calls = [replace(first, layer=layer) for layer in range(3)]
        states = [method.new_state(call, batch) for call in calls]
        for call, state in zip(calls, states, strict=True):
            ledger.add("decode", call, "kascade", method.run(call, state), Spans.dense())
        ledger.commit()
    assert ledger.tallies["decode", 2, None].steps == 1


# reads

DENSE: Any = ((Spans.dense(),), (Spans.dense(),), ([0], 0))


def reads_of(call: LayerCall) -> Any:
    """Selections of keys, of values, and metadata."""
    return call.meter.keys, call.meter.values, metadata_of(call)


def test_what_it_reads(tmp_path: Path) -> None:
    """Layer 0 all keys and values once, an anchor all keys and the chosen values, a reuse layer the chosen."""
    last = read_text(Kascade(planned(tmp_path, (0, 2)), k=5), text(40))[-1]

    def counts(call: LayerCall, selections: Any) -> list[list[int]]:
        return [s.keys_read(call.rows, call.kv)[0].tolist() for s in selections]

    for layer, (keys, values) in enumerate((([40], [40]), ([5], [5]), ([40], [5]))):
        call, reads = last.calls[layer], last.calls[layer].meter
        assert counts(call, reads.keys) == [[n] * KV_HEADS for n in keys]
        assert counts(call, reads.values) == [[n] * KV_HEADS for n in values]
    assert reads_of(last.calls[0]) == DENSE


def test_what_tiles_read(tmp_path: Path) -> None:
    """Rows at 10 and 11 of tiles of 4: 11 and 12 keys for their lse, which dense attention gives as well, 8 before the
    tile to score; then 3 of these 8 with the 3 and 4 of the tile, in one pass."""
    first = read_text(Kascade(planned(tmp_path, (0, 2)), k=3), text(15))[0]

    def counts(layer: int) -> list[list[list[int]]]:
        """Of keys and of values: what each pass reads of one head for rows 10 and 11, and those after them."""
        call, columns = first.calls[layer], ("key_bytes", "value_bytes")
        return [[[heads[0] for heads in rows[10:]] for rows in passes_of(call, column)] for column in columns]

    assert counts(0) == [[[11, 12], [8, 8]], [[11, 12]]]
    assert counts(1) == [[[6, 7]], [[6, 7]]]
    assert counts(2) == [[[11, 12], [8, 8], [6, 7]], [[6, 7]]]
    scored = passes_of(first.calls[2], "key_bytes")[0]
    assert scored[:5] == [[0, 0], [0, 0], [0, 0], [0, 0], [5, 5]], "the first tile chooses nothing"
    sampled = read_text(Kascade(planned(tmp_path, (0, 2)), k=3, score_every=3), text(15))[0].calls[2]
    lse, before, attended = passes_of(sampled, "key_bytes")
    assert [row[0] for row in lse] == [0, 0, 0, 0, 5, 0, 0, 8, 9, 0, 0, 12] and attended == [
        [n, n] for n in (1, 2, 3, 4, 4, 5, 6, 7, 4, 5, 6, 7)
    ]
    assert [row[0] for row in before] == [0, 0, 0, 0, 4, 0, 0, 4, 8, 0, 0, 8]


def test_a_dense_layer_whose_choice_nobody_takes_makes_none(tmp_path: Path) -> None:
    """Layer 1 chooses for itself, so layer 0 has nobody to choose for; and so it is where the others are dense."""
    for anchors, dense in (((0, 1), ()), ((0, 2), (1,)), ((0, 1), (1, 2))):
        for turn in read_text(Kascade(planned(tmp_path, anchors), k=3, dense_layers=dense), text(20)):
            for layer in (0, *dense):
                assert reads_of(turn.calls[layer]) == (*DENSE[:2], ([0] * len(turn.calls[layer].rows.pos), 0))
            choices = [c for c in turn.calls[0].shared.values() if isinstance(c, AnchorSelection)]
            assert [c.anchor for c in choices] == [layer for layer in anchors[1:] if layer not in dense]


def test_after_eviction_it_is_refused(tmp_path: Path) -> None:
    """In the layer that keys were dropped from, an anchor or not; an 8-bit copy there is of the kept keys."""
    method, whole, cache = Kascade(planned(tmp_path), k=5, scoring="int8"), text(40), new_cache()
    read_text(method, whole, chunks=[30], steps=2, cache=cache)
    kept = torch.stack([torch.arange(0, 30, 2), torch.arange(1, 31, 2)])
    for layer in (2, 1):
        cache.keep(layer, [0], [kept])
        with pytest.raises(Unsupported, match=r"kascade: after eviction .* or do not evict"):
            run(cache, method, [Turn(whole, 0)])
        cache.truncate([0], [32])  # the pass that failed is over
    (state,) = cache.state.states((method,), 1)  # type: ignore[attr-defined]
    keys = state.copy["keys"][0, :, :15].float() * state.copy["scale"][0, :, :15, None]
    want = torch.stack([whole.k[1, kept[g], g] for g in range(KV_HEADS)])
    torch.testing.assert_close(keys, want, rtol=0, atol=float(want.abs().max()) / 127)
