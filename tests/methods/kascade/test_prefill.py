"""A prompt's tiles: what the host knows of them, how many are scored at a time, samples, dense prompts, refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import longreach
from longreach.adapters.transformers import shape_of
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.kascade import Kascade
from longreach.methods.kascade import prefill as reading
from longreach.methods.kascade.prefill import bytes_of_tile, groups_of, scored_rows, tiles_of
from longreach.ops import KVView, RowRange, Rows, TileLists
from longreach.runtime import Ledger
from longreach.testing.tiny import random_tokens, tiny_model
from tests.methods.drive import CACHES, Turn, exact, new_cache, outputs, read_text, run, text
from tests.methods.kascade.planned import planned
from tests.ops.attend.kernels import PLACE, needs_gpu
from tests.tiers import swept

BUDGET = Kascade(k=0.2, min_keys=3).budget


def rows_of(*runs: tuple[int, int, int]) -> Rows:
    """Rows of runs (rows, sequence, first position), known to the host."""
    seq = torch.cat([torch.full((n,), b) for n, b, _ in runs])
    pos = torch.cat([torch.arange(first, first + n) for n, _, first in runs])
    return Rows(torch.zeros(len(seq), 4, 16), seq, pos, tuple(RowRange(*run) for run in runs))


RUNS = [
    [(40, 0, 0)],
    [(13, 0, 0), (29, 1, 0), (0, 2, 7), (1, 3, 5)],
    [(7, 0, 30), (16, 1, 8), (3, 2, 9)],  # chunks that begin and end within tiles
]


@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_the_hosts_knowledge_gives_the_tiles_of_the_positions(runs: list[tuple[int, int, int]]) -> None:
    rows = rows_of(*runs)
    known, read = (tiles_of(x, 4, BUDGET) for x in (rows, replace(rows, runs=None)))
    for a, b in ((known.tiles.rows, read.tiles.rows), (known.tiles.start, read.tiles.start), (known.of, read.of)):
        assert torch.equal(a, b)
    assert torch.equal(known.host.keys, read.host.keys) and torch.equal(known.host.start, read.host.start)
    known.tiles.check(rows)
    assert torch.equal(rows.pos // 4 * 4, known.host.start[known.of])
    there = known.tiles.rows >= 0
    assert torch.equal(known.tiles.rows[there].sort().values, torch.arange(len(rows.pos), dtype=torch.int32))


def test_rows_in_any_order() -> None:
    rows = rows_of((40, 0, 0), (21, 1, 3))
    order = torch.randperm(61)
    mixed = tiles_of(Rows(rows.q, rows.seq[order], rows.pos[order]), 4, BUDGET)
    plain = tiles_of(rows, 4, BUDGET)
    back = torch.where(mixed.tiles.rows >= 0, order[mixed.tiles.rows.long()], -1)
    assert torch.equal(back, plain.tiles.rows.long()) and torch.equal(mixed.of, plain.of[order])


@pytest.mark.parametrize("every", [1, 2, 3, 4, 9])
def test_samples_of_rows(every: int) -> None:
    """Each tile's first row of the pass is scored, and every so many-th after it; the host counts what is read."""
    rows = rows_of((13, 0, 0), (29, 1, 2), (1, 3, 21))
    tiles = tiles_of(rows, 4, BUDGET)
    kv = KVView(*torch.zeros(2, 4, 2, 64, 16), torch.tensor([64] * 4))
    scored = scored_rows(LayerCall(0, rows, kv, torch.arange(4), 1.0), tiles, every)
    for mine, all_rows, keys in zip(scored.tiles.rows, tiles.tiles.rows, tiles.host.keys, strict=True):
        want = all_rows[all_rows >= 0][::every] if int(keys) else all_rows[:0]
        assert torch.equal(mine[mine >= 0], want)
    assert scored.tiles.rows.shape[1] == -(-4 // every)
    assert scored.lse_keys == int(scored.visible.keys_read(rows, kv).sum())
    assert scored.keys_before == int(scored.before.keys_read(rows, kv).sum())


@pytest.mark.parametrize("every", [1, 2, 7])
def test_the_host_counts_the_keys_of_an_estimate(every: int) -> None:
    """64 first slots, one of `every` between, 128 before the tile and the tile's own up to the row."""
    rows = rows_of((500, 0, 0), (60, 1, 190))
    tiles = tiles_of(rows, 4, BUDGET)
    kv = KVView(*torch.zeros(2, 2, 2, 512, 16), torch.tensor([512, 512]))
    scored = scored_rows(LayerCall(0, rows, kv, torch.arange(2), 1.0), tiles, 1, every)
    want = 0
    for pos, tile in zip(rows.pos.tolist(), tiles.of.tolist(), strict=True):
        start = int(tiles.host.start[tile])
        if int(tiles.host.keys[tile]):
            slots = range(pos + 1)
            want += sum(n < 64 or n >= start - 128 or (n - 64) % every == 0 for n in slots)
    assert scored.lse_keys == 2 * want


def test_groups_of_tiles_fit_their_memory() -> None:
    """At 128K tokens of Llama-3.1-8B's heads 256 MiB hold some 30 tiles of the end, and more of the beginning."""
    start = torch.arange(4096) * 32
    keys = (start * 0.1).long()
    host = reading.HostTiles(torch.zeros(4096, 32), torch.zeros(4096, 32), start, keys * (keys > 128))
    groups = groups_of(host, 8, 8, 240 << 20)
    assert [g.stop for g in groups[:-1]] == [g.start for g in groups[1:]] and groups[-1].stop == 4096
    assert int(host.keys[: groups[0].start].max()) == 0 < int(host.keys[groups[0].start])
    each = bytes_of_tile(start, host.keys, 8, 8)
    for group in groups:
        count = group.stop - group.start
        assert int(each[group].max()) * count <= 240 << 20
    assert groups[-2].stop - groups[-2].start in range(30, 40) and len(groups) < 90
    assert [g.stop - g.start for g in groups_of(host, 8, 8, 0)] == [1] * int((host.keys > 0).sum())


@pytest.mark.parametrize("scratch", [0, 5_000, 30_000, 1 << 30])
def test_groups_take_as_many_tiles_as_fit(scratch: int) -> None:
    """Tiles of several sequences, in any order: none could begin a group of the one before it."""
    draw = torch.Generator().manual_seed(1)
    start = torch.randint(0, 400, (60,), generator=draw)
    keys = torch.where(torch.rand(60, generator=draw) < 0.7, start // 3, 0)
    host = reading.HostTiles(torch.zeros(60, 4), torch.zeros(60, 4), start, keys)
    groups, each = groups_of(host, 2, 2, scratch), bytes_of_tile(start, keys, 2, 2)
    taken = {n for group in groups for n in range(group.start, group.stop)}
    assert taken >= set((keys > 0).nonzero().flatten().tolist()) and sum(g.stop - g.start for g in groups) == len(taken)
    for group in groups:
        assert int(keys[group.start]) > 0
        ends = group.stop, group.stop + 1
        size, more = (int(each[group.start : stop].max()) * (stop - group.start) for stop in ends)
        assert size <= scratch or group.stop == group.start + 1
        assert more > scratch or group.stop == 60


def test_groups_are_found_once_a_pass_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, groups_of = list[int](), reading.groups_of

    def count(*given: Any) -> list[slice]:
        asked.append(1)
        return groups_of(*given)

    monkeypatch.setattr(reading, "groups_of", count)
    read_text(Kascade(planned(tmp_path, (0, 2)), k=3), text(40), steps=0)
    assert len(asked) == 1
    seconds = []
    for tiles in (512, 32768):
        start = torch.arange(tiles) * 32
        host = reading.HostTiles(torch.zeros(tiles, 1), torch.zeros(tiles, 1), start, (start * 0.1).long())
        seconds.append(min(_seconds(lambda host=host: groups_of(host, 8, 8, 1 << 24)) for _ in range(3)))
    assert seconds[1] < 640 * seconds[0], "64 times the tiles; a quadratic search takes 4096 times as long"


def _seconds(call: Callable[[], Any]) -> float:
    """Of this thread alone: other processes may hold the core for longer than the call takes."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_batch_in_chunks_is_each_prompt_at_once(impl: str, config: CacheConfig, tmp_path: Path) -> None:
    """Ragged, and chunks that are multiples of a tile."""
    method = Kascade(planned(tmp_path, (0, 1), {2: (1, 0)}), k=0.2, min_keys=2, sinks=1)
    texts = [text(48, seed=1).to(PLACE), text(33, seed=2).to(PLACE)]  # of which read_text decodes three
    want = [read_text(method, x, impl=impl) for x in texts]
    cache = new_cache(config, slots=2, device=PLACE)
    first = run(cache, method, [Turn(texts[0], 0, 24), Turn(texts[1], 1, 8)], impl=impl)
    last = run(cache, method, [Turn(texts[0], 0, 21), Turn(texts[1], 1, 22)], impl=impl)
    for row, alone in enumerate(want):
        got = torch.cat([first.outs(row), last.outs(row)], 1)
        torch.testing.assert_close(got, outputs(alone[:1])[:, : got.shape[1]], rtol=0, atol=2e-5)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_both_implementations_choose_the_same_keys(impl: str, tmp_path: Path) -> None:
    method = Kascade(planned(tmp_path, (0, 1)), k=0.2, min_keys=2)
    found = []
    for who in ("reference", impl):
        call = read_text(method, text(60).to(PLACE), impl=who)[0].calls[2]
        (selection,) = call.meter.values
        assert isinstance(selection, TileLists)
        found.append(selection.entries)
    assert torch.equal(*found)


def test_prompts_within_the_budget_attend_densely_and_say_so(tmp_path: Path) -> None:
    budget, short = "the budget covers all keys", "fewer than 64 tokens (dense_below)"
    for options, why in (
        ({"k": 1000}, budget), ({"k": 3, "dense_below": 64}, short), ({"k": 1000, "dense_below": 64}, budget)
    ):  # fmt: skip
        turn = read_text(Kascade(planned(tmp_path, (0, 1)), **options), text(40))[0]
        assert [o.dense_reason for o in turn.outcomes] == ["first anchor", why, why]
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            torch.testing.assert_close(outcome.partial.out.double(), exact(call).out, rtol=0, atol=1e-5)


def test_tiles_below_the_limit_attend_to_all_keys(tmp_path: Path) -> None:
    """The others choose; a tile that begins below the limit is dense wherever a chunk ends."""
    method = Kascade(planned(tmp_path, (0, 1)), k=3, dense_below=22)
    call = read_text(method, text(40))[0].calls[2]
    (selection,) = call.meter.values
    counts = selection.keys_read(call.rows, call.kv)[:, 0]
    assert counts[:24].tolist() == list(range(1, 25)), "tiles begin at 0, 4, ..., 20"
    assert counts[24:].tolist() == [3 + n % 4 + 1 for n in range(24, len(counts))]


@pytest.mark.parametrize("chunks", [[40], [16, 24], [8, 8, 8, 16]], ids=str)
def test_the_report_counts_the_rows_below_the_limit(chunks: list[int], tmp_path: Path) -> None:
    """The same rows wherever chunks end. Layers whose other rows are sparse are not noted as dense."""
    method, ledger = Kascade(planned(tmp_path, (0, 1)), k=3, dense_below=22), Ledger()
    for turn in read_text(method, text(40), chunks=chunks, steps=0):
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            ledger.add("prefill", call, "kascade", outcome, exact_selection())
        ledger.commit()
    report = ledger.report()
    some = "dense for 24 of 40 rows: fewer than 22 tokens (dense_below)"
    assert [layer.dense_notes for layer in report.layers] == [("dense: first anchor",), (some,), (some,)]
    assert str(report).count(some) == 2 and report.to_json()["layers"][1]["dense_counts"] == [24]


def test_the_report_counts_the_rows_that_the_budget_covers(tmp_path: Path) -> None:
    method, ledger = Kascade(planned(tmp_path, (0, 1)), k=10), Ledger()
    for turn in read_text(method, text(40), chunks=[8, 32], steps=0):
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            ledger.add("prefill", call, "kascade", outcome, exact_selection())
        ledger.commit()
    assert ledger.report().layers[2].dense_notes == ("dense for 8 of 40 rows: the budget covers all keys",)


def test_the_report_names_a_sample(tmp_path: Path) -> None:
    said = "tiles scored by every 4th row; lse from every 2th key"
    for every, note in ((1, None), (4, said)):
        method, ledger = (
            Kascade(planned(tmp_path, (0, 1)), k=3, score_every=every, lse_every=1 if every == 1 else 2),
            Ledger(),
        )
        turn = read_text(method, text(40))[0]
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            ledger.add("prefill", call, "kascade", outcome, exact_selection())
        ledger.commit()
        notes = [layer.notes for layer in ledger.report().layers]
        assert [n and n["note"] for n in notes] == [None, note, None], "layer 0 serves no other layer here"
        assert note is None or note in str(ledger.report())


def exact_selection() -> Any:
    from longreach.ops.doors import EVERYTHING

    return EVERYTHING


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_a_sample_is_a_count(value: Any) -> None:
    for name in ("score_every", "lse_every"):
        with pytest.raises(InvalidInput, match=f"{name}: expected a count >= 1"):
            Kascade.make(**{name: value})


def test_a_tile_larger_than_a_program_takes(tmp_path: Path) -> None:
    """Triton's programs hold 128 rows x query heads: these of 129 x 2 are cut, and choose the reference's keys."""
    method = Kascade(planned(tmp_path, (0, 1), tile=258), k=3, min_keys=2)
    want, got = (read_text(method, text(270).to(PLACE), impl=impl, steps=0) for impl in ("reference", "triton"))
    torch.testing.assert_close(outputs(got), outputs(want), rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk", swept([12, 5, 50], 2))
@torch.no_grad()
def test_generate_reads_prompts_in_chunks(chunk: int, tmp_path: Path) -> None:
    """transformers' prefill_chunk_size: chunks that end within a tile run as well."""
    model = tiny_model("llama", num_hidden_layers=4)
    plan = planned(tmp_path, (0, 2), {3: (1, 0)}, model=shape_of(model), layers=(0, 1, 2, 3))
    tokens = random_tokens(2, 50)
    with longreach.attach(model, prefill=Kascade(plan, k=0.2, min_keys=3)) as session:
        whole = model.generate(tokens, max_new_tokens=4, do_sample=False)
        parts = model.generate(tokens, max_new_tokens=4, do_sample=False, prefill_chunk_size=chunk)
        sparse = session.report().fraction("prefill")
    assert sparse is not None and parts.shape == whole.shape
    if chunk % 4 == 0 or chunk >= 50:
        assert torch.equal(parts, whole)


@torch.no_grad()
def test_several_questions_about_one_document(tmp_path: Path) -> None:
    """A question's rows share the document's last tile, and choose for themselves there."""
    method = Kascade(planned(tmp_path, (0, 1), {2: (1, 0)}), k=0.2, min_keys=2)
    cache, document = new_cache(), text(60, seed=3)
    run(cache, method, [Turn(document, 0, 42)])
    want = None
    for _ in range(2):
        got = run(cache, method, [Turn(document, 0, 9)], phase="prefill").outs(0)
        assert want is None or torch.equal(got, want)
        want = got
        cache.truncate([0], [42])


def test_prompts_of_stored_chunks_refuse_it(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    plan = planned(tmp_path, (0, 2), model=shape_of(model), layers=(0, 1, 2, 3))
    with pytest.raises(Unsupported, match="kascade"):
        longreach.attach(model, prefill=Kascade(plan), fuse="full_reuse")


SHAPE = ModelShape(3, 32, 8, 128, config="that of the GPU's tests")


def gpu_calls(length: int) -> list[LayerCall]:
    shared: dict[Any, Any] = {}
    q = torch.randn(length, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 8, length, 128, device="cuda", dtype=torch.bfloat16)
    kv = KVView(k, v, torch.tensor([length], dtype=torch.int32, device="cuda"))
    pos = torch.arange(length, dtype=torch.int32, device="cuda")
    rows = Rows(q, torch.zeros_like(pos), pos, (RowRange(length, 0, 0),))
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    return [LayerCall(n, rows, kv, slots, 128**-0.5, phase="prefill", model=SHAPE, shared=shared) for n in range(3)]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"score_every": 4, "lse_every": 16}, {"heads": "all"}, {"dense_layers": (1,)}])
def test_a_prompt_waits_for_nothing_on_the_device(options: dict[str, Any], tmp_path: Path) -> None:
    method = Kascade(planned(tmp_path, (0, 1), tile=128, model=SHAPE), **options)
    calls = gpu_calls(8192)
    states = [method.new_state(call, 1) for call in calls]
    for call, state in zip(calls, states, strict=True):  # compiles
        method.run(call, state)
    calls = gpu_calls(8192)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call, state in zip(calls, states, strict=True):
            method.run(call, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"score_every": 4, "lse_every": 16}, {"heads": "all"}])
def test_an_anchors_scratch_is_bounded_at_128k(options: dict[str, Any], tmp_path: Path) -> None:
    """Beside the lists and the result at most 256 MiB, whatever the length: here measured, with room for rounding."""
    length = 131_072
    method = Kascade(planned(tmp_path, (0, 1), tile=128, model=SHAPE), **options)
    call = gpu_calls(length)[1]
    state = method.new_state(call, 1)
    tiles = method._tiles(call, state)  # type: ignore[arg-type]
    scored = scored_rows(call, tiles, method.score_every)
    lists = 4 * int(tiles.host.keys.sum()) * (1 if method.heads == "all" else 8)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    reading.choose_for_tiles(method.budget, call, tiles, scored, None)
    assert torch.cuda.max_memory_allocated() - before - lists <= (256 << 20) + (16 << 20)


@needs_gpu
@pytest.mark.gpu
def test_a_long_prompt_on_a_gpu_is_attention_over_its_lists(tmp_path: Path) -> None:
    """16K tokens, bf16: a reuse layer's last rows against fp32 over the keys that it reports."""
    method = Kascade(planned(tmp_path, (0, 1), {2: (1, 1, 0, 3, 4, 7, 6, 5)}, tile=128, model=SHAPE))
    calls = gpu_calls(16_384)
    outcomes = [method.run(call, method.new_state(call, 1)) for call in calls]
    (selection,) = calls[2].meter.values
    index = torch.tensor([16_383, 16_300, 9_000, 4_097, 31], device="cuda")
    rows, kv = calls[2].rows.take(index), calls[2].kv
    wide = KVView(kv.k.float(), kv.v.float(), kv.seq_lens)
    want = longreach.ops.attend(
        Rows(rows.q.float(), rows.seq, rows.pos), wide, selection.take(index), scale=128**-0.5, impl="reference"
    )
    got = outcomes[2].partial.out[index]
    assert float((got - want.out).norm() / want.out.norm()) < 2**-8
