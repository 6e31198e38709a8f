"""Decoding over sampled keys, against the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch

from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.magicpig import PRESETS, MagicPIG
from longreach.methods.magicpig import state as state_module
from longreach.methods.magicpig.state import LayerTables
from longreach.methods.registry import choose
from longreach.ops import Lists
from longreach.ops.doors import EVERYTHING
from longreach.ops.simhash import projections, sealing
from longreach.runtime import Ledger, Segment
from tests.methods.drive import Turn, in_phase, new_cache, outputs, read_text, run, text
from tests.methods.magicpig.plain import attended, sealed, weights
from tests.methods.one_layer import CACHES, Layers, keys_of
from tests.ops.attend.kernels import PLACE

SMALL = {"bits": 4, "tables": 9, "local": 8, "seal": 8, "centre": 16, "dense_layers": ()}
every_cache = pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-3}  # inputs are exact, sums in fp32


def check(method: MagicPIG, done: Sequence[tuple[LayerCall, Any]], before: Sequence[int]) -> int:
    """Every row against its definition; how many keys were left out. before: tokens of each sequence."""
    left_out = 0
    for call, outcome in done:
        for row in range(call.rows.pos.shape[0]):
            log_weight = weights(method, call, row, before[int(call.rows.seq[row])])
            out, lse = attended(call, row, log_weight)
            near = {"rtol": 0, "atol": ROUNDING[call.rows.q.dtype]}
            torch.testing.assert_close(outcome.partial.out[row].double(), out, **near)
            torch.testing.assert_close(outcome.partial.lse[row].double(), lse, **near)
            left_out += int((log_weight == -torch.inf).sum())
    return left_out


@pytest.mark.covering
@every_cache
@pytest.mark.parametrize("group", [1, 2, 3, 16])
@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_rows_of_a_batch(config: Any, group: int, share: str, dtype: torch.dtype) -> None:
    """Ragged, over steps in which keys enter the tables; one sequence is shorter than sinks and recent tokens."""
    method = MagicPIG.make(**{**SMALL, "bits": 8 if group == 16 else 4}, share=share)
    layers = Layers(method, group=group, config=config, dtype=dtype, slots=4)
    lengths = {3: 43, 0: 20, 2: 5}
    layers.read(list(lengths), list(lengths.values()))
    for _ in range(8):
        left_out = check(method, layers.decode(list(lengths)), list(lengths.values()))
        lengths = {slot: n + 1 for slot, n in lengths.items()}
        assert left_out


@pytest.mark.parametrize(
    "method",
    [
        MagicPIG(bits=5, tables=6, least=1, local=4, seal=16, centre=0, seed=7, dense_layers=()),
        MagicPIG(bits=3, tables=9, least=3, sinks=0, local=1, seal=1, centre=5, floor=0.2, dense_layers=()),
        MagicPIG(bits=5, tables=12, sinks=11, local=5, seal=3, centre=9, capacity=0.1, share="own", dense_layers=()),
        MagicPIG(bits=5, tables=12, local=5, seal=3, centre=9, capacity=8, dense_layers=()),
        MagicPIG(bits=10, tables=75, local=8, seal=8, centre=9, dense_layers=()),
    ],
    ids=repr,
)
def test_options(method: MagicPIG) -> None:
    layers = Layers(method, slots=1)
    layers.read([0], [49])
    for n in range(49, 53):
        assert check(method, layers.decode([0]), [n])


def test_several_new_tokens_at_once() -> None:
    """All rows of a pass attend by the tables that were there before it."""
    method = MagicPIG.make(**SMALL)
    layers = Layers(method, slots=2)
    layers.read([0, 1], [30, 44])
    done = layers._pass(Segment("decode", method), [1, 0], [21, 2], {})
    assert check(method, done, [44, 30])
    assert check(method, layers.decode([0, 1]), [32, 65])


@pytest.mark.parametrize("share", ["own", "group"])
def test_capacity_is_of_each_rows_own_context(share: Any) -> None:
    """A short row whose list is too long for its context, and would not be for that of the other row."""
    method = MagicPIG(bits=6, tables=12, local=4, seal=4, centre=0, capacity=0.1, share=share, dense_layers=())
    texts, lengths = (text(140, seed=1), text(31, seed=2, heavy=dict.fromkeys(range(6, 18), 8.0))), [139, 30]
    found = {}
    for impl, place in (
        ("reference", "cpu"),
        *((x, "cpu") for x in ["numba"] * bool(find_spec("numba"))),
        ("triton", PLACE),
    ):
        cache, mine = new_cache(slots=2, device=place), [whole.to(place) for whole in texts]
        turns = [Turn(whole, slot, n) for slot, (whole, n) in enumerate(zip(mine, lengths, strict=True))]
        run(cache, in_phase(method, "prefill"), turns, phase="prefill")
        found[impl] = run(cache, method, [turn._replace(count=1) for turn in turns], phase="decode", impl=impl)
    call, outcome = found["reference"].calls[0], found["reference"].outcomes[0]
    check(method, [(call, outcome)], lengths)
    free = weights(replace(method, capacity=1.0), call, 1, 30)[:, method.sinks : sealed(method, 30)]
    sampled = (free > -torch.inf).sum(1)[:: 1 if share == "own" else 2]
    lists = call.meter.values[-1]
    assert isinstance(lists, Lists) and not bool(lists.overflowed[0].any())
    assert torch.equal(lists.overflowed[1], sampled > 4) and bool(((sampled > 4) & (sampled <= 14)).any())
    for done in found.values():
        for mine_of, wanted in zip(done.outcomes, found["reference"].outcomes, strict=True):
            torch.testing.assert_close(mine_of.partial.out.cpu(), wanted.partial.out, rtol=0, atol=2e-5)


def test_an_overflow_attends_densely_and_is_counted() -> None:
    method = MagicPIG(bits=1, tables=30, local=8, seal=8, centre=16, capacity=5, dense_layers=())
    layers = Layers(method, slots=1)
    layers.read([0], [60])
    ((call, outcome),) = layers.decode([0])
    assert check(method, [(call, outcome)], [60]) == 0
    lists = call.meter.values[-1]
    assert isinstance(lists, Lists) and bool(lists.overflowed.all())
    columns = outcome.notes.columns(*(x[None] for x in outcome.notes.tensors)).sum(1)[0]
    said = outcome.notes.summary(columns, 1)
    assert said["overflowed"] == [1.0, 1.0] and said["sampled_group"] == said["sampled_head"] == [1.0, 1.0]
    assert "100.00% of lists overflowed" in said["note"]


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize(
    "options", [{}, {"share": "own"}, {"error_bars": True}, {"redo": 0.1}, {"centre": 0, "local": 40}], ids=str
)
def test_a_short_context_is_dense(options: dict[str, Any], impl: str) -> None:
    """The same output and the same bytes as dense attention, which notes and report show."""
    method = MagicPIG(**{"bits": 10, "tables": 75, "local": 16, "seal": 8, "dense_layers": (), **options})
    layers = Layers(method, slots=2)
    layers.read([0, 1], [20, 9])
    ((call, _),) = layers.decode([0, 1])
    mine, dense, ledger = replace(call.observer(), impl=impl), replace(call.observer(), impl=impl), Ledger()
    outcome, want = method.run(mine, layers.state()), Dense().run(dense, None)
    assert torch.equal(outcome.partial.out, want.partial.out) and torch.equal(outcome.partial.lse, want.partial.lse)
    assert check(method, [(mine, outcome)], [20, 9]) == 0
    assert method._needs_lists == (outcome.relative_error is not None)
    assert outcome.relative_error is None or not bool(outcome.relative_error.any())
    ledger.add("decode", mine, method.name, outcome, EVERYTHING)
    ledger.commit()
    (layer,) = ledger.report().layers
    assert layer.fraction == 1.0 and layer.metadata_bytes == 0 and layer.rows == 2
    assert layer.dense_reasons == ("no keys in the tables yet",) and layer.notes is not None
    assert (layer.notes["sampled_rows"], layer.notes["search_bytes"]) == (0, 0)
    assert layer.notes["attention_bytes"] == layer.bytes_read and layer.notes["sampled_group"] == [0.0, 0.0]
    assert layer.notes.get("redone", [0.0, 0.0]) == [0.0, 0.0]


@pytest.mark.parametrize("options", [{}, {"error_bars": True}], ids=str)
def test_the_report_covers_steps_before_and_after_the_first_block(options: dict[str, Any]) -> None:
    """Search and attention are all that was read; sampled shares are of the rows with keys in the tables."""
    method = MagicPIG.make(**SMALL, **options)
    layers, ledger = Layers(method, slots=1), Ledger()
    layers.read([0], [20])
    reasons = []
    for _ in range(15):
        ((call, outcome),) = layers.decode([0])
        ledger.add("decode", call, method.name, outcome, EVERYTHING)
        ledger.commit()
        reasons.append(outcome.dense_reason)
    sampled = reasons.count(None)
    assert 0 < sampled < 15 and reasons[-sampled:] == [None] * sampled
    (layer,) = ledger.report().layers
    assert layer.notes is not None and layer.notes["sampled_rows"] == sampled
    parts = [layer.notes.get(f"{name}_bytes", 0) for name in ("search", "attention", "error_bar")]
    assert sum(parts) == pytest.approx(layer.bytes_read, abs=15)
    assert all(share > 0 for share in layer.notes["sampled_group"])


def test_a_batch_with_one_short_context_samples() -> None:
    """The host goes by all sequences of the pass, and by no others of the cache."""
    method = MagicPIG.make(**SMALL)
    layers = Layers(method, slots=2)
    layers.read([0, 1], [9, 60])
    ((call, outcome),) = layers.decode([0, 1])
    assert outcome.dense_reason is None and check(method, [(call, outcome)], [9, 60])
    ((call, outcome),) = layers.decode([0])
    assert outcome.dense_reason and check(method, [(call, outcome)], [10]) == 0


def test_a_cache_too_small_for_a_block_needs_no_look_at_the_tables() -> None:
    """As on a GPU, where looking would wait for the device."""
    method = MagicPIG.make(**SMALL)
    for room in (method.schedule.start - 1, method.schedule.start):
        layers = Layers(method, slots=1, config=CacheConfig(capacity=room))
        layers.read([0], [20])
        ((call, _),) = layers.decode([0])
        state = layers.state()
        assert isinstance(state, LayerTables) and call.kv.capacity == room
        state.tables.stop.fill_(method.sinks + 1)  # were it read, there would be keys
        assert method._known_empty(call, state) == (room < method.schedule.start)


def test_layers_without_tables() -> None:
    layers = Layers(MagicPIG(tables=75), layers=6, slots=1)  # 0 and 16 of 32
    layers.read([0], [9])
    reasons = [outcome.dense_reason for _, outcome in layers.decode([0])]
    assert [n for n, reason in enumerate(reasons) if reason == "in dense_layers"] == [0, 3]
    assert Layers(MagicPIG(bits=0)).method.state_bytes(layers.model, 3, 100, torch.float32) == 0


def test_the_report_of_a_layer() -> None:
    """Shares are those of the lists; search and attention bytes are each by its definition."""
    for share in ("own", "group"):
        method = MagicPIG.make(**SMALL, share=share)
        layers = Layers(method, slots=2, heads=2, group=3)
        layers.read([0, 1], [70, 41])
        ((call, outcome),) = layers.decode([0, 1])
        found = call.meter.values[-1]
        assert isinstance(found, Lists)
        columns = outcome.notes.columns(*(x[None] for x in outcome.notes.tensors)).sum(1)[0]
        said = outcome.notes.summary(columns, 2)
        context = call.context.double()[:, None]
        union = (found.keys_read(call.rows, call.kv) / context).mean(0)
        torch.testing.assert_close(torch.tensor(said["sampled_group"], dtype=torch.float64), union)
        alone = (
            weights(MagicPIG.make(**SMALL, share="own"), call, 0, 70),
            weights(MagicPIG.make(**SMALL, share="own"), call, 1, 41),
        )
        for head in range(2):
            mine = []
            for row, n in enumerate((70, 41)):
                some = alone[row][3 * head : 3 * head + 3, method.sinks : sealed(method, n)]
                mine.append(float((some > -torch.inf).sum()) / 3 / (n + 1))
            assert said["sampled_head"][head] == pytest.approx(sum(mine) / 2)
        state = layers.state()
        assert isinstance(state, LayerTables)
        keys = 2 * 2 * state.capacity * 16 * 4
        assert said["kv_bytes_per_sequence"] == keys
        assert said["table_share"] == said["table_bytes_per_sequence"] / keys
        want = reads(method, call, (70, 41))
        assert (said["search_bytes"], said["attention_bytes"]) == (want.search, want.attention)
        assert "error_bar_bytes" not in said


class Expected(NamedTuple):
    """Bytes of a step: look-ups and weights, attention, a second pass over the sample."""

    search: int
    attention: int
    bars: int


def reads(method: MagicPIG, call: LayerCall, before: Sequence[int]) -> Expected:
    """Bytes of a step in which no block enters the tables, from its definition. Keys are fp32."""
    heads, group, dim = call.kv.heads, call.rows.q.shape[1] // call.kv.heads, call.kv.k.shape[3]
    vector, bits, tables = 4 * dim, *method.pair
    directions = projections(dim, bits, tables, method.seed).double()
    found = torch.zeros(3, dtype=torch.int64)
    found[0] = 2 * directions.numel()  # bf16, once for all rows
    for row in range(call.rows.pos.shape[0]):
        n, log_weight = before[int(call.rows.seq[row])], weights(method, call, row, before[int(call.rows.seq[row])])
        keys, stop = keys_of(call, row), sealed(method, n)
        centre = keys[method.sinks :][: method.centre].mean(0).float().double()
        for g in range(heads):
            mine = slice(g * group, (g + 1) * group)
            attended = log_weight[mine] > -torch.inf
            sampled = attended[:, method.sinks : stop]
            union = int(sampled.any(0).sum())
            entries = union if method.share == "group" else int(sampled.sum())
            hashed = torch.einsum("nd,lbd->nlb", keys[method.sinks : stop, g] - centre[g], directions) > 0
            for q in call.rows.q[row, mine].double():
                in_bucket = int((hashed == (directions @ q > 0)).all(-1).sum())
                found[0] += tables * 2 * 2 + 2 * in_bucket  # two offsets of a table's one segment, and ids
            found[0] += union * vector + 4 * entries + vector  # keys, their slots, the centre
            found[1] += int(attended.any(0).sum()) * 2 * vector + 8 * entries  # keys and values; slots, log-weights
            found[2] += union * 2 * vector + 12 * entries + vector  # the same of the sample, factors, the centre
    return Expected(*found.tolist())


@pytest.mark.parametrize("share", ["own", "group"])
def test_bytes_of_error_bars_and_of_redone_rows(share: str) -> None:
    """The second pass over the sample is apart; all keys of redone rows belong to attention."""
    for more, redone in (({"error_bars": True}, 0), ({"redo": 0.0}, 1)):
        method = MagicPIG.make(**SMALL, share=share, **more)
        layers = Layers(method, slots=2, heads=2, group=3)
        layers.read([0, 1], [70, 41])
        ((call, outcome),) = layers.decode([0, 1])
        want = reads(method, call, (70, 41))
        columns = outcome.notes.columns(*(x[None] for x in outcome.notes.tensors)).sum(1)[0]
        said = outcome.notes.summary(columns, 2)
        again = redone * (71 + 42) * 2 * 2 * 16 * 4  # of both KV heads
        assert said["redone"] == [redone, redone]
        assert (said["search_bytes"], said["error_bar_bytes"]) == (want.search, want.bars)
        assert said["attention_bytes"] == want.attention + again


@pytest.mark.parametrize("share", ["own", pytest.param("group", marks=pytest.mark.sweep)])
def test_triton(share: str) -> None:
    """All of a step by Triton's kernels, sealing included: the keys of the reference."""
    method = MagicPIG(bits=3, tables=3, local=4, seal=4, centre=6, share=share, dense_layers=())  # type: ignore[arg-type]
    whole, results = text(22, seed=8), []
    for impl, place in (("reference", "cpu"), ("triton", PLACE)):
        passes = read_text(method, whole.to(place), impl=impl)
        results.append(outputs(passes).cpu())
    assert {name for call in passes[-1].calls for name in call.meter.kernels_used} == {"triton"}
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


@pytest.mark.parametrize("share", ["own", "group"])
def test_reports_are_those_of_every_implementation(share: str) -> None:
    """Bytes, and lists that overflowed: all of one sequence, none of the other."""
    method = MagicPIG(bits=3, tables=3, local=4, seal=4, centre=6, share=share, dense_layers=(), capacity=0.4)  # type: ignore[arg-type]
    found, layers = [], Layers(method, slots=2, heads=2, group=3, seed=5)
    keys = torch.cat([torch.ones(40, 2, 16) * torch.linspace(1, 2, 40)[:, None, None], layers.random(40, 2, 16)])
    layers.read([0, 1], [40, 40], k=keys)
    q = torch.cat([torch.ones(1, 6, 16), layers.random(1, 6, 16)])
    ((call, _),) = layers.decode([0, 1], q=q, k=layers.random(2, 2, 16))
    free = weights(replace(method, share="own", capacity=1.0), call, 1, 40)[:, method.sinks : sealed(method, 40)]
    sampled = (free > -torch.inf).unflatten(0, (2, 3))  # of the row whose lists all fit
    head, group = (sampled.double().sum(2).mean(1) / 41).tolist(), (sampled.any(1).sum(1).double() / 41).tolist()
    for impl in ("reference", "numba", *(["triton"] if PLACE == "cpu" else [])):
        mine, ledger = replace(call.observer(), impl=impl), Ledger()
        ledger.add("decode", mine, method.name, method.run(mine, layers.state()), EVERYTHING)
        ledger.commit()
        (layer,) = ledger.report().layers
        assert layer.notes is not None
        assert layer.notes["sampled_head"] == pytest.approx(head) and layer.notes["sampled_group"] == pytest.approx(
            group
        )
        assert f"{sum(layer.notes['overflowed']) / 2:.2%} of lists overflowed" in layer.notes["note"]
        found.append((layer.overflowed_lists, layer.key_bytes, layer.value_bytes, layer.notes))
    assert found[0] == found[1] and all(other[:3] == found[0][:3] for other in found[2:])
    assert 0 < found[0][0] < (12 if share == "own" else 4)


def test_presets_and_text() -> None:
    for bits, tables in PRESETS:
        method = choose("decode", f"magicpig bits={bits} tables={tables}")
        assert isinstance(method, MagicPIG) and (method.bits, method.tables) == (bits, tables)
    default = choose("decode", "magicpig")
    assert isinstance(default, MagicPIG) and (default.pair, default.share) == ((10, 75), "group")
    with pytest.raises(InvalidInput, match=r"tables: expected at least 3, .* in least=3 of them, got 2; .* or least=2"):
        MagicPIG(tables=2, least=3)
    with pytest.raises(InvalidInput, match=r"tables: expected at least 2, .* in least=2 of them, got 1; .* or least=1"):
        MagicPIG(tables=1)
    assert MagicPIG(tables=1, least=1).pair == (10, 1)


def test_options_without_an_effect_are_named() -> None:
    others: tuple[dict[str, Any], ...] = (
        {"tables": 75}, {"least": 1}, {"share": "own"}, {"sinks": 3}, {"local": 8}, {"seal": 8}, {"centre": 8},
        {"floor": 0.1}, {"capacity": 9}, {"seed": 1}, {"dense_layers": ()}, {"error_bars": True}, {"redo": 0.0},
    )  # fmt: skip
    assert {name for other in others for name in other} == MagicPIG.options().keys() - {"bits", "plan", "budget"}
    for other in others:
        (name,) = other
        with pytest.raises(
            InvalidInput, match=f"{name}: expected bits >= 1, as bits=0 reads all keys .* leave {name} out"
        ):
            MagicPIG(bits=0, **other)
    with pytest.raises(InvalidInput, match=r"tables, centre: .* leave tables and centre out, or bits=0"):
        MagicPIG(bits=0, tables=75, centre=8)
    with pytest.raises(InvalidInput, match=r"seal: expected a count of tokens in \[1, 65536\], got 65537"):
        MagicPIG(seal=65537)
    assert MagicPIG(bits=0) == choose("decode", "magicpig bits=0")


def test_eviction_is_refused() -> None:
    method = MagicPIG.make(**SMALL)
    layers = Layers(method, slots=2)
    layers.read([0], [50])
    layers.keep(0, 0, 20)
    with pytest.raises(Unsupported, match=r"magicpig: after eviction a slot holds other keys.*tables name keys by"):
        layers.decode([0])
    layers.cache.reset([0])
    layers.read([0], [40])
    assert check(method, layers.decode([0]), [40])


@pytest.mark.parametrize("emptied", ["reset", "truncate"])
def test_eviction_leaves_the_tables_of_other_sequences(emptied: str) -> None:
    """Once the evicted sequence is gone, the others decode by the tables that they had, and its slot by new ones."""
    method = MagicPIG.make(**SMALL)
    layers = Layers(method, slots=2)
    layers.read([0, 1], [50, 61])
    layers.decode([0, 1])
    state = layers.state()
    assert isinstance(state, LayerTables)
    stop, ids, centre = (x[1].clone() for x in (state.tables.stop, state.tables.ids.view(torch.int16), state.centre))
    layers.keep(0, 0, 20)
    with pytest.raises(Unsupported, match="after eviction a slot holds other keys"):
        layers.decode([1])
    layers.cache.reset([0]) if emptied == "reset" else layers.cache.truncate([0], [0])
    assert state.tables.stop.tolist() == [method.sinks, int(stop)] and int(stop) > method.sinks
    assert torch.equal(state.tables.ids[1].view(torch.int16), ids) and torch.equal(state.centre[1], centre)
    layers.read([0], [44])
    assert check(method, layers.decode([1, 0]), [62, 44])


def test_when_blocks_enter() -> None:
    for options in ((4, 1, 8, 100), (0, 1, 1, 5), (11, 5, 3, 9), (4, 64, 256, 0), (300, 8, 16, 0)):
        method = MagicPIG(**dict(zip(("sinks", "local", "seal", "centre"), options, strict=True)))  # type: ignore[arg-type]
        for layer in (0, 1, 2, 77):
            found = method.schedule.stop(torch.arange(700), layer)
            assert found.tolist() == [sealed(method, n, layer) for n in range(700)]


def test_layers_seal_at_different_tokens() -> None:
    """Once all complete blocks have entered, each layer seals one in `seal` steps, no two of 256 layers in the same."""
    schedule, tokens = MagicPIG().schedule, torch.arange(3000, 3256)
    before, after = (schedule.stops(n, range(256)) for n in (tokens, tokens + 1))
    sealing = after != before
    assert bool((sealing.sum(0) == 1).all() and (sealing.sum(1) == 1).all()) and int((after - before).max()) == 256
    few = (schedule.stops(tokens + 1, range(32)) != schedule.stops(tokens, range(32))).any(0).nonzero()[:, 0]
    assert int(few.diff().max()) <= 16  # 32 layers: one in 8 steps, at most twice as far apart


def test_segments_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than a segment and than what is hashed at a time, in any chunks."""
    monkeypatch.setattr(state_module, "SEGMENT", 16)
    monkeypatch.setattr(sealing, "AT_ONCE", 5)
    method = MagicPIG.make(**{**SMALL, "centre": 21})
    for chunks in ([90], [1, 60, 29], [13] * 6 + [12]):
        layers = Layers(method, slots=2, seed=3)
        keys, at = layers.random(90, 2, 16), 0
        for count in chunks:
            layers.read([1], [count], k=keys[at : at + count])
            at += count
        for n in range(90, 94):
            assert check(method, layers.decode([1]), [n])
