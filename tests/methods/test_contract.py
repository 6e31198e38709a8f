"""What every method promises, asked of every registered one. cases.py holds what must be known of each."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import longreach
from longreach.cache import CacheConfig, KVCache
from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.methods.base import AttentionMethod, Outcome
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.oracle_top_k import OracleTopK
from longreach.methods.registry import METHODS, from_json, method_class
from longreach.ops import KVView, Lists, PackedLists, Partial, Rows, Selection, Spans, TileLists
from longreach.ops.attend import IMPLEMENTATIONS, attend
from longreach.ops.doors import Later
from longreach.ops.pooled_scores import IMPLEMENTATIONS as scoring
from longreach.runtime import LayerReport, Ledger
from longreach.testing.tiny import PAD_ID, random_tokens, save_tiny, tiny_model
from longreach.testing.tolerance import assert_close
from tests.methods import two_ranks
from tests.methods.cases import CASES, CONFIGS, CONTEXT, HEAVY, each_config
from tests.methods.drive import (
    CACHES,
    DIM,
    LAYERS,
    MODEL,
    Pass,
    Turn,
    exact,
    in_phase,
    new_cache,
    outputs,
    read_text,
    run,
    shares,
    slots_read,
    text,
    tolerance,
)

every_method = pytest.mark.parametrize("name", METHODS)
every_config = pytest.mark.parametrize("method", **each_config)
every_cache = pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
ROUNDING = 2e-5  # between two orders of the same sums, for outputs of size 1


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=ROUNDING)


def test_every_registered_method_has_a_case() -> None:
    assert set(CASES) == set(METHODS), "give each method of the registry its entry in tests/methods/cases.py"
    for name, case in CASES.items():
        for method in (case.everything, case.default, *case.variants, *([case.lost.method] if case.lost else [])):
            assert method.name == name
        assert case.lost is not None or name == "dense", "say what lies outside the selection"


# 1. budgets


@every_method
@every_cache
def test_everything_is_dense(name: str, config: CacheConfig) -> None:
    for length in (1, 2, 41):
        for turn in read_text(CASES[name].everything, text(length, seed=length), steps=1, cache=new_cache(config)):
            for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
                assert_close(outcome.partial, exact(call))


@every_method
def test_heavy_keys_are_attended_to(name: str) -> None:
    """Planted keys that the default budget covers: the error is as predicted, and little is missed."""
    case = CASES[name]
    heavy = dict.fromkeys(case.heavy, HEAVY)
    for turn in read_text(case.default, text(CONTEXT, heavy=heavy), steps=1):
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            dense = exact(call)
            error = (outcome.partial.out.double() - dense.out).abs()
            assert bool((error <= case.predicted(call, outcome)[..., None] + tolerance(dense)).all())
    assert turn.calls[0].rows.pos.tolist() == [CONTEXT - 1]
    for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
        missed = case.missed(call)
        assert float(missed.max()) < 0.05
        assert name == "dense" or outcome.dense_reason or float(missed.min()) > 0


@every_method
def test_a_heavy_key_outside_the_selection_is_missed(name: str) -> None:
    case, lost = CASES[name], CASES[name].lost
    if lost is None:
        pytest.skip(f"{name} selects everything")
    last = read_text(lost.method, text(CONTEXT, heavy=lost.heavy), steps=1)[-1]
    sparse = [(c, o) for c, o in zip(last.calls, last.outcomes, strict=True) if not o.dense_reason]
    assert sparse
    for call, outcome in sparse:
        assert not slots_read(call, case.attended(call))[0, :, lost.slot].any()
        assert float(shares(call)[0, :, lost.slot].min()) > 0.3
        dense = exact(call)
        error = (outcome.partial.out.double() - dense.out).abs()
        assert bool((error.amax(-1) > 0.05).all()) and bool((error.amax(-1) > 100 * tolerance(dense).amax(-1)).all())
        assert bool((error <= case.predicted(call, outcome)[..., None] + tolerance(dense)).all())


# 2. sequences


@every_config
@every_cache
def test_sequences_do_not_affect_each_other(method: AttentionMethod, config: CacheConfig) -> None:
    """Ragged, in any slots, in any order, prefilled and decoded interleaved: each as if it were alone."""
    texts = [text(n, seed=n) for n in (38, 9, 23)]
    alone = [outputs(read_text(method, t, steps=4)) for t in texts]
    cache = new_cache(config, slots=6)
    slots = [4, 0, 3]
    prefill, decode = in_phase(method, "prefill"), in_phase(method, "decode")
    found: list[list[Tensor]] = [[], [], []]

    def go(who: AttentionMethod, order: Sequence[int], counts: Sequence[int]) -> None:
        turn = run(cache, who, [Turn(texts[i], slots[i], n) for i, n in zip(order, counts, strict=True)])
        for row, i in enumerate(order):
            found[i].append(turn.outs(row))

    go(prefill, [0], [34])
    go(decode, [0], [1])
    go(prefill, [2, 1], [19, 5])
    go(decode, [1, 0], [1, 1])
    go(decode, [2, 1, 0], [1, 1, 1])
    go(decode, [0, 2], [1, 1])
    go(decode, [1, 2], [1, 1])
    go(decode, [2, 1], [1, 1])
    for parts, want in zip(found, alone, strict=True):
        close(torch.cat(parts, 1), want)


@every_config
@every_cache
def test_a_slot_forgets(method: AttentionMethod, config: CacheConfig) -> None:
    """After a reset, a failed pass and a cut, a sequence is what it would be in a new cache."""
    cache, first, second = new_cache(config, slots=2), text(30, seed=1), text(37, seed=2)
    neighbour = text(37, seed=3)
    read_text(method, first, cache=cache, slot=1)
    cache.reset([1])
    want = outputs(read_text(method, second, steps=6))

    def fails(call: LayerCall) -> None:
        if call.layer == 1:
            raise KeyboardInterrupt

    run(cache, in_phase(method, "prefill"), [Turn(second, 1, 31), Turn(neighbour, 0, 12)])
    found = []
    decode = in_phase(method, "decode")
    for n in range(6):
        with pytest.raises(KeyboardInterrupt):
            run(cache, decode, [Turn(neighbour, 0), Turn(second, 1)], before=fails)
        if n == 3:  # go on past the end, and come back
            run(cache, decode, [Turn(second, 1)])
            try:
                cache.truncate([1], [34])
            except Unsupported:
                assert cache.lengths == [15, 35]
                return
        found.append(run(cache, decode, [Turn(neighbour, 0), Turn(second, 1)]).outs(1))
    close(torch.cat(found, 1), want[:, 31:])


@every_config
def test_batches_of_a_model(method: AttentionMethod, model: Any) -> None:
    """Left-padded, in any order: each sequence gets the tokens it gets alone."""
    tokens = random_tokens(3, 45)
    mask = torch.ones_like(tokens)
    mask[0, :20], mask[2, :3] = 0, 0
    tokens = tokens.masked_fill(mask == 0, PAD_ID)

    def generate(rows: list[int], first: int = 0) -> Tensor:
        out = model.generate(tokens[rows, first:], attention_mask=mask[rows, first:], max_new_tokens=4, do_sample=False)
        return out[:, -4:]

    with attached(model, method):
        alone = torch.cat([generate([0], 20), generate([1]), generate([2], 3)])
        assert torch.equal(generate([0, 1, 2]), alone)
        assert torch.equal(generate([2, 0, 1]), alone[[2, 0, 1]])


# 3. chunks


@every_config
@every_cache
def test_chunks_make_no_difference(method: AttentionMethod, config: CacheConfig) -> None:
    whole = text(27, seed=5)
    if not method.chunked_prefill_exact:
        pytest.skip(f"{method.name} does not claim that chunked prefill is exact")
    want = outputs(read_text(method, whole))
    for chunks in ([23, 1], [1, 23], [5, 1, 7, 11], [7, 7, 7, 3], [1] * 24):
        close(outputs(read_text(method, whole, chunks=chunks, cache=new_cache(config))), want)


# 4. implementations


def assert_agrees(method: AttentionMethod, impl: str) -> None:
    """Against fp64, `impl` may err at most twice as much as PyTorch in the same dtype, plus rounding."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    half = torch.bfloat16 if place == "cuda" else torch.float16  # Triton's interpreter gets bf16 wrong
    interpreted = place == "cpu" and impl == "triton"  # which takes long
    for dtype in (half,) if interpreted else (torch.float32, half):
        whole = text(8 if interpreted else 50, seed=8).to(dtype).to(place)
        steps = 2 if interpreted else 3
        want = outputs(read_text(method, whole.to(torch.float64), steps=steps, impl="reference"))
        torchs = outputs(read_text(method, whole, steps=steps, impl="reference")).to(
            dtype
        )  # PyTorch's results are of the inputs' dtype
        reference = (torchs.double() - want).abs().max()
        other = (outputs(read_text(method, whole, steps=steps, impl=impl)).double() - want).abs().max()
        assert float(other) <= 2 * float(reference) + ROUNDING, f"{impl} errs by {other}, the reference by {reference}"


@every_config
def test_implementations_agree(method: AttentionMethod) -> None:
    others = {name: cannot_run(name) for name in IMPLEMENTATIONS.names() if name != "reference"}
    for other, why in others.items():
        if why is None:
            assert_agrees(method, other)
    if all(others.values()):
        pytest.skip("; ".join(f"{other} {why}" for other, why in others.items()) or "attend has the reference alone")


def cannot_run(impl: str) -> str | None:
    """Why an implementation cannot be tried on this machine."""
    if impl.startswith("sdpa"):
        return "takes whole prompts only (tests/ops/attend/test_sdpa.py)"
    if impl != "triton":
        return None
    if find_spec("triton") is None:
        return "is not installed here"
    here = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    return None if here else "needs a GPU, or TRITON_INTERPRET=1"


@pytest.mark.parametrize("method", [Dense(), OracleTopK()], ids=repr)
def test_a_sloppy_implementation_is_found(method: AttentionMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (IMPLEMENTATIONS, scoring):
        monkeypatch.setitem(op.paths, "same", op.paths["reference"])
        monkeypatch.setitem(op.paths, "sloppy", op.paths["reference"])
    assert_agrees(method, "same")
    monkeypatch.setitem(IMPLEMENTATIONS.paths, "sloppy", f"{__name__}:half_scaled")
    with pytest.raises(AssertionError, match="sloppy errs by"):
        assert_agrees(method, "sloppy")


def half_scaled(rows: Rows, kv: KVView, selection: Selection, *, scale: float, **logits: Any) -> Partial:
    return attend(rows, kv, selection, scale=scale / 2, impl="reference", **logits)


# 5. configuration


@every_config
def test_configuration_round_trips_through_json(method: AttentionMethod) -> None:
    written = json.dumps(method.to_json())
    assert from_json(written) == method and from_json(json.loads(written)) == method
    assert hash(from_json(written)) == hash(method)


@every_method
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(UnknownName) as error:
        method_class(name).make(nonsense=1)
    assert f"unknown option of {name} 'nonsense'" in str(error.value)
    assert all(option in str(error.value) for option in method_class(name).options())
    with pytest.raises(UnknownName):
        from_json({**CASES[name].default.to_json(), "nonsense": 1})


@pytest.mark.parametrize(("name", "options"), [(n, o) for n, case in CASES.items() for o in case.refused])
def test_bad_values_are_refused(name: str, options: dict[str, Any]) -> None:
    (option,) = options
    with pytest.raises(InvalidInput, match=f"{option}: expected"):
        method_class(name).make(**options)


@every_config
def test_options_that_fit_a_model_are_taken(method: AttentionMethod) -> None:
    method.check(MODEL)


# 6. in and out of a model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=LAYERS)


def attached(model: Any, method: AttentionMethod, **options: Any) -> longreach.adapters.transformers.Session:
    slots = {phase: method for phase in method.phases}
    return longreach.attach(model, **slots, **options)


@every_config
def test_nothing_stays_behind(method: AttentionMethod, model: Any) -> None:
    tokens = random_tokens(2, 30, seed=7)

    def answer() -> tuple[Tensor, Tensor]:
        return model(tokens).logits.detach(), model.generate(tokens, max_new_tokens=4, do_sample=False)

    before = answer()
    with attached(model, method) as session:
        answer()
    assert method.name in {layer.method for layer in session.report().layers}
    assert all(torch.equal(a, b) for a, b in zip(answer(), before, strict=True))
    with pytest.raises(KeyboardInterrupt), attached(model, method):
        answer()
        raise KeyboardInterrupt
    assert all(torch.equal(a, b) for a, b in zip(answer(), before, strict=True))


# 7. reports


def poison(call: LayerCall, seq: int, head: int, slots: Tensor, what: str) -> None:
    """NaN into keys or values of one sequence and KV head."""
    page, offset = call.kv.locate(torch.full_like(slots, seq), slots)
    getattr(call.kv, what)[page, head, offset] = torch.nan


def scenes(method: AttentionMethod, config: CacheConfig) -> Iterator[tuple[KVCache, AttentionMethod, list[Turn]]]:
    """A cache and the pass that comes next: a ragged prefill, one that continues, and decoding."""
    cache = new_cache(config, slots=4)
    texts = [text(n, seed=n) for n in (50, 11, 33)]
    prefill = in_phase(method, "prefill")
    turns = [Turn(texts[0], 2, 33), Turn(texts[1], 0, 4)]
    yield cache, prefill, turns
    run(cache, prefill, turns)
    turns = [Turn(texts[1], 0, 5), Turn(texts[2], 3, 30), Turn(texts[0], 2, 13)]
    yield cache, prefill, turns
    run(cache, prefill, turns)
    for order in ([0, 1, 2], [2, 0]):
        turns = [Turn(texts[i], (2, 0, 3)[i]) for i in order]
        yield cache, in_phase(method, "decode"), turns
        run(cache, in_phase(method, "decode"), turns)


def again(cache: KVCache, method: AttentionMethod, turns: list[Turn], before: Any = None) -> Pass:
    """The pass on a copy of the cache, its state included."""
    return run(copy.deepcopy(cache), method, turns, before=before)


def bits(turn: Pass) -> list[bytes]:
    return [x.numpy().tobytes() for o in turn.outcomes for x in (o.partial.out, o.partial.lse)]


def union(call: LayerCall, selections: Sequence[Selection], seq: int) -> Tensor:
    """bool [G, N]: what any row of the sequence reads."""
    return slots_read(call, selections)[call.rows.seq == seq].any(0)


@every_config
@every_cache
def test_what_the_report_calls_unread_is_unread(method: AttentionMethod, config: CacheConfig) -> None:
    hidden = 0
    for cache, who, turns in scenes(method, config):
        plain = again(cache, who, turns)

        def hide(call: LayerCall, plain: Pass = plain) -> None:
            nonlocal hidden
            meter = plain.calls[call.layer].meter
            for what, selections in (("k", meter.keys), ("v", meter.values)):
                for seq, filled in enumerate(call.kv.seq_lens.tolist()):
                    for head, read in enumerate(union(call, selections, seq)):
                        slots = (~read[:filled]).nonzero()[:, 0]
                        poison(call, seq, head, slots, what)
                        hidden += slots.numel()

        assert bits(again(cache, who, turns, hide)) == bits(plain)
        assert not any(o.partial.out.isnan().any() for o in plain.outcomes)
    assert hidden or method.name == "dense"


@every_config
@every_cache
def test_what_the_report_calls_read_is_read(method: AttentionMethod, config: CacheConfig) -> None:
    """Poison in a key or value that weighs something is seen by the row that reads it, in that layer and head.

    Of values, those that are attended to: others may be read for the softmax's normaliser alone.
    """
    dice = random.Random(0)
    for cache, who, turns in scenes(method, config):
        plain = again(cache, who, turns)
        for layer, (call, outcome) in enumerate(zip(plain.calls, plain.outcomes, strict=True)):
            attended = CASES[method.name].attended(call) if who is method else call.meter.values
            for what, selections in (("k", call.meter.keys), ("v", attended)):
                row = dice.randrange(call.rows.pos.shape[0])
                seq, head = int(call.rows.seq[row]), dice.randrange(call.kv.heads)
                group = slice(2 * head, 2 * head + 2)
                weight = shares(call)[row, group].sum(0)[: int(call.kv.seq_lens[seq])]
                read = slots_read(call, selections)[row, head, : weight.shape[0]]
                slot = int((weight * read).argmax())
                assert float(weight[slot]) > 1e-3

                def hide(now: LayerCall, at: tuple[Any, ...] = (layer, seq, head, slot, what)) -> None:
                    if now.layer == at[0]:
                        poison(now, at[1], at[2], torch.tensor([at[3]]), at[4])

                seen = again(cache, who, turns, hide).outcomes[layer].partial
                assert not torch.equal(seen.out[row, group], outcome.partial.out[row, group])


def bytes_read(calls: Sequence[LayerCall], vector: int) -> list[int]:
    """Bytes of keys, values and metadata that calls of one layer read, and those of dense attention: slot by slot.

    A pass by lists reads, for each row and KV head, as many entries as it reads slots (or blocks), whether it reads
    keys, values or both. A count that a kernel made must be the one that the selection says.
    """
    columns = [0, 0, 0, 0]
    for noted in (noted for call in calls for noted in call.meter.noted):
        rows, kv, read = noted.rows, noted.kv, noted.read
        columns[2] += int(torch.as_tensor(read.other.now() if isinstance(read.other, Later) else read.other).sum())
        if read.selection is None:
            continue
        streamed = read.selection.streamed(rows, kv)
        if isinstance(read.counted, int):
            assert read.counted == int(streamed.sum())
        elif read.counted is not None:
            assert torch.equal(read.counted.long(), streamed.sum(-1))
        for column, size in enumerate((read.key_bytes, read.value_bytes, read.metadata_bytes)):
            assert size in (0, vector) or column == 2
            columns[column] += int(streamed.sum()) * size
        lists = read.selection.lists if isinstance(read.selection, TileLists) else read.selection
        if isinstance(lists, (Lists, PackedLists)):
            weight = 0 if lists.log_weight is None else lists.log_weight.element_size()
            stop = -(-kv.capacity // lists.block) * lists.block
            blocks = lists.mask(rows, kv, stop) if lists.per == "query" else lists.streamed(rows, kv, stop)
            if isinstance(lists, Lists):  # a list that overflowed is not read
                over = lists.overflowed if lists.row_to_list is None else lists.overflowed[lists.row_to_list.long()]
                blocks = blocks & ~over[..., None]
            blocks = blocks.unflatten(-1, (-1, lists.block)).any(-1)
            columns[2] += int(blocks.sum()) * (lists.index.element_size() + weight)
    columns[3] = 2 * vector * int(Spans.dense().streamed(calls[0].rows, calls[0].kv).sum())
    return columns


def columns_of(layer: LayerReport) -> list[int]:
    return [layer.key_bytes, layer.value_bytes, layer.metadata_bytes, layer.dense_bytes]


@every_config
@every_cache
def test_bytes_are_those_of_the_slots_read(method: AttentionMethod, config: CacheConfig) -> None:
    ledger, want = Ledger(), torch.zeros(LAYERS, 4, dtype=torch.int64)
    for cache, who, turns in scenes(method, config):
        plain = again(cache, who, turns)
        if who is not method:
            continue
        for call, outcome in zip(plain.calls, plain.outcomes, strict=True):
            ledger.add("decode", call, who.name, outcome, Spans.dense())
            want[call.layer] += torch.tensor(bytes_read([call], DIM * 4))
        ledger.commit()
    for layer in ledger.report().layers:
        assert columns_of(layer) == want[layer.layer].tolist()
        assert layer.steps == (4 if "prefill" in method.phases else 2)
        assert layer.fraction > 0
        if method.name.startswith("oracle_"):
            assert layer.fraction >= 1.0, "an oracle reads everything to know what to read"


@every_config
def test_a_session_reports_what_its_layers_read(
    method: AttentionMethod, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the method reads to observe a prompt included."""
    counted: dict[tuple[str, int], torch.Tensor] = {}
    observed, observing = set[int](), type(method).observe_prompt

    def add(calls: Sequence[LayerCall]) -> None:
        place, found = (calls[0].phase, calls[0].layer), torch.tensor(bytes_read(calls, 16 * 4))
        counted[place] = counted.get(place, torch.zeros(4, dtype=torch.int64)) + found

    def on_layer(phase: str, call: LayerCall, outcome: Outcome) -> None:
        add([call])

    def observe_prompt(self: AttentionMethod, call: LayerCall, state: Any) -> None:
        known = len(call.meter.noted)
        observing(self, call, state)
        if not known and call.meter.noted and call.phase == "prefill":  # in `run` it counts with the rest
            more = torch.tensor(bytes_read([call], 16 * 4))
            more[3] = 0
            counted[call.phase, call.layer] = counted.get((call.phase, call.layer), 0) + more
            observed.add(call.layer)

    monkeypatch.setattr(type(method), "observe_prompt", observe_prompt)

    with attached(model, method) as session:
        session.on_layer = on_layer
        model.generate(random_tokens(2, 30), max_new_tokens=5, do_sample=False)
    report = session.report()
    assert len(report.layers) == 2 * LAYERS
    for layer in report.layers:
        assert columns_of(layer) == counted[layer.phase, layer.layer].tolist()
        assert layer.rows == (60 if layer.phase == "prefill" else 8)
        who = in_phase(method, layer.phase).name
        beside = f"+{method.name}" if layer.phase == "prefill" and layer.layer in observed else ""
        assert layer.method == who + beside
    assert bool(observed) == isinstance(method, (longreach.MAC, longreach.MagicPIG))


# 8. ranks


@pytest.mark.sweep  # the fast tier runs each method's default in tests/adapters/transformers/test_shard.py
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, plans_of_tests: Path) -> None:
    """Every configuration at once, since the two processes take longest to start."""
    directory = save_tiny(tmp_path / "model", num_hidden_layers=LAYERS, eos_token_id=None)
    root, source = Path(__file__).parents[2], Path(longreach.__file__).parents[1]
    path = {"PYTHONPATH": f"{source}{os.pathsep}{root}", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    paths = [directory, tmp_path / "out", tmp_path / "store", plans_of_tests]
    script = [sys.executable, "-m", two_ranks.__name__, *map(str, paths)]
    running = [
        subprocess.Popen(
            script,
            cwd=root,
            env={**os.environ, **path, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        alone = two_ranks.answers(model, [method for _, method in CONFIGS])
        for process in running:
            said = process.communicate(timeout=100)[1]
            assert process.returncode == 0, said
    finally:
        for process in running:
            process.kill()
    for rank in range(2):
        kv_channels, found = torch.load(tmp_path / f"out.{rank}")
        assert kv_channels == 16, "each rank holds one of the two KV heads"
        assert set(found) == set(alone)
        for config, (tokens, logits) in alone.items():
            assert torch.equal(found[config][0], tokens), f"rank {rank}, {config}"
            torch.testing.assert_close(found[config][1], logits, rtol=1e-4, atol=1e-3, msg=f"rank {rank}, {config}")
