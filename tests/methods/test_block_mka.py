"""A window and recalled blocks, beside loops in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import AttentionMethod, Outcome
from longreach.methods.block_mka import BlockCodes, BlockMKA, ends_of
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.dense import Dense
from longreach.ops import Lists, RotaryFrequencies, Rows, Spans
from longreach.ops.recall import planes_of
from longreach.ops.types import RowRange
from longreach.runtime import Pass, Segment, StateStore, drive
from longreach.testing.oracle import Exact, exact_attend
from longreach.testing.tolerance import assert_close
from tests.methods.drive import Turn, new_cache, outputs, read_text, text
from tests.methods.drive import run as run_text
from tests.methods.metered import metadata_of, passes_of
from tests.methods.one_layer import CACHES, Layers, chosen_by, keys_of
from tests.ops.test_rope import frequencies, turned

FEW = BlockMKA(block=5, window=10, blocks=2, recall="summary")
KNOWN = RotaryFrequencies(frequencies(16))
every_cache = pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
every_kind = pytest.mark.parametrize(
    "method",
    [FEW, replace(FEW, recall="bounds"), replace(FEW, recall="hash", bits=64)],
    ids=["summary", "bounds", "hash"],
)


def layers_of(method: BlockMKA, **more: Any) -> Layers:
    return Layers(method, frequencies=lambda: KNOWN, **more)


def plain(x: Tensor, pos: Tensor) -> Tensor:
    """fp64 x [n, D] at positions [n] before rotation."""
    return turned(x, -pos, KNOWN.inv_freq, "half")


def scores_of(method: BlockMKA, call: LayerCall, row: int, head: int, blocks: int) -> Tensor:
    """fp64 [blocks]: as the paper and Quest have them, from the keys that the row sees."""
    group, size, pos = call.rows.q.shape[1] // call.kv.heads, method.block, int(call.rows.pos[row])
    keys, queries = keys_of(call, row)[:, head], call.rows.q[row, head * group : (head + 1) * group].double()
    found = torch.zeros(group, blocks, dtype=torch.float64)
    planes = planes_of(keys.shape[1], method.bits, method.seed).double()
    for h, q in enumerate(queries):
        for block in range(blocks):
            k, at = keys[block * size : (block + 1) * size], torch.arange(block * size, (block + 1) * size).double()
            if method.recall == "bounds":
                found[h, block] = torch.maximum(q * k.amin(0), q * k.amax(0)).sum()
                continue
            mean = plain(k, at).mean(0, keepdim=True)
            if method.recall == "summary":
                found[h, block] = call.scale * q @ turned(mean, at.mean()[None], KNOWN.inv_freq, "half")[0]
            else:
                own = plain(q[None], torch.tensor([pos]).double())[0]
                found[h, block] = float((((own @ planes) >= 0) == ((mean[0] @ planes) >= 0)).sum())
    return (found.softmax(-1) if method.recall == "summary" else found).sum(0)


def wanted(method: BlockMKA, call: LayerCall, row: int, head: int) -> tuple[list[int], list[int]]:
    """(blocks of the window, recalled blocks): among equal scores the later."""
    own = int(call.rows.pos[row]) // method.block
    before = max(0, own - method.window // method.block)
    scores = scores_of(method, call, row, head, before).tolist()
    best = sorted(range(before), key=lambda n: (scores[n], n), reverse=True)[: method.blocks]
    return list(range(before, own + 1)), sorted(best)


def attended(call: LayerCall, row: int, head: int) -> list[int]:
    """Slots that a row attends to, in order."""
    some = torch.stack([s.streamed(call.rows, call.kv)[row, head] for s in call.meter.values])
    assert int(some.sum(0).max()) <= 1, "no key is attended to twice"
    return some.any(0).nonzero()[:, 0].tolist()


def exact(method: BlockMKA, call: LayerCall) -> Exact:
    """fp64 attention over window and recalled blocks in one softmax."""
    size = method.window // method.block + 1 + method.blocks
    every = [[wanted(method, call, r, g) for g in range(call.kv.heads)] for r in range(len(call.rows.pos))]
    lists = [[near + best for near, best in row] for row in every]
    index = torch.tensor([[one + [0] * (size - len(one)) for one in row] for row in lists])
    count = torch.tensor([[len(one) for one in row] for row in lists])
    return exact_attend(call.rows, call.kv, Lists(index, count, block=method.block), scale=call.scale)


def check(method: BlockMKA, call: LayerCall, outcome: Outcome) -> None:
    for row, pos in enumerate(call.rows.pos.tolist()):
        for head in range(call.kv.heads):
            near, best = wanted(method, call, row, head)
            slots = [
                n for block in sorted(near + best) for n in range(block * method.block, (block + 1) * method.block)
            ]
            assert attended(call, row, head) == [n for n in slots if n <= pos]
    assert_close(outcome.partial, exact(method, call))


@every_kind
@every_cache
@pytest.mark.parametrize("group", [1, 3])
def test_window_and_best_blocks(method: BlockMKA, config: CacheConfig, group: int) -> None:
    """Ragged, in any order of slots, as sequences grow past the ends of blocks and windows."""
    layers = layers_of(method, group=group, config=config)
    layers.read([2, 0], [37, 6])
    layers.read([1, 2], [12, 9])
    for slots in ([0, 1, 2], [2, 1], [1, 0], [2, 0, 1], [1], [1], [0]):
        ((call, outcome),) = layers.decode(slots)
        check(method, call, outcome)


@every_kind
def test_prompts(method: BlockMKA) -> None:
    """Every row of a prompt chooses for itself; so it is read as it would be decoded."""
    layers = layers_of(method)
    for slots, counts in (([0, 2], [33, 8]), ([1, 0], [21, 12])):
        for call, outcome in layers._pass(Segment("prefill", method), slots, counts, {}):
            check(method, call, outcome)
    whole = text(48, seed=3)
    want = outputs(read_text(method, whole, chunks=[45], steps=3))
    cache, found = new_cache(), []
    for _ in range(48):
        found.append(run_text(cache, method, [Turn(whole, 0)], phase="decode").outs(0))
    torch.testing.assert_close(torch.cat(found, 1), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("pos", "first"), [(0, 0), (4, 0), (5, 0), (14, 0), (15, 5), (19, 5), (20, 10), (24, 10), (25, 15), (39, 25)]
)
def test_windows_begin_at_the_edge_of_a_block(pos: int, first: int) -> None:
    """The row's own block and window / block before it: no key lies between window and blocks."""
    layers = layers_of(replace(FEW, blocks=1))
    if pos:
        layers.read([0], [pos])
    ((call, _),) = layers.decode([0])
    slots = attended(call, 0, 0)
    assert slots[-1] == pos and set(range(first, pos + 1)) <= set(slots)
    recalled = [n for n in slots if n < first]
    assert len(recalled) == min(5, first) and len({n // 5 for n in recalled}) == min(1, first)


@pytest.mark.parametrize("length", [1, 3, 5, 14, 15])
def test_contexts_within_a_window_are_dense(length: int) -> None:
    layers = layers_of(FEW)
    layers.read([0, 1], [length - 1, 60] if length > 1 else [1, 60])  # the cache has room for more
    ((call, outcome), *_) = layers.decode([0])
    assert_close(outcome.partial, exact_attend(call.rows, call.kv, Spans.dense(), scale=call.scale))
    assert metadata_of(call).rows == [0]


def test_a_short_cache_recalls_nothing() -> None:
    method = BlockMKA()
    layers = layers_of(method, config=CacheConfig(capacity=500))
    layers.read([0], [400])
    ((call, outcome),) = layers.decode([0])
    assert_close(outcome.partial, exact_attend(call.rows, call.kv, Spans.dense(), scale=call.scale))
    assert "recall" not in str(call.meter.kernels_used) and len(layers.states.states()) == 1


def test_later_blocks_win_ties() -> None:
    """Keys that are all the same: hashes and summaries tell no block from another."""
    for method in (replace(FEW, recall="hash", bits=8), replace(FEW, recall="bounds")):
        layers = layers_of(method)
        layers.read([0], [50], k=torch.zeros(50, 2, 16))
        ((call, _),) = layers.decode([0])
        assert chosen_by(call, 0, 0) == [8, 9, 10, 6, 7]  # the window, then the recalled ones


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_layers_reuse_blocks(phase: Any) -> None:
    """Of the last layer in share; layers that do not recall keep and read no codes."""
    method = replace(FEW, share=(1, 3), dense_layers=(0,))
    layers = layers_of(method, layers=5)
    layers.read([0], [44])
    found = layers.decode([0]) if phase == "decode" else layers._pass(Segment("prefill", method), [0], [9], {})
    assert [outcome.dense_reason for _, outcome in found] == ["in dense_layers", None, None, None, None]
    assert [len(layers.states.states(layer=n)) for n in range(5)] == [0, 1, 0, 1, 0]
    chosen = [attended(call, 0, 0) for call, _ in found]
    assert chosen[1] == chosen[2] and chosen[3] == chosen[4] and chosen[1] != chosen[3]
    for n in (1, 3):
        check(replace(method, share=()), *found[n])
    assert [sum(metadata_of(call).rows) > 0 for call, _ in found] == [False, True, False, True, False]


def test_a_layer_whose_anchor_has_a_window_is_refused_by_name() -> None:
    method, layers = replace(FEW, share=(0, 2)), layers_of(FEW, layers=3)
    layers.read([0], [44])
    calls = [call for call, _ in layers.decode([0])]
    step = Pass((Segment("decode", method),), layers.model, StateStore(3))
    again = [replace(call.observer(), phase="prefill", shared=step.shared) for call in calls]
    with pytest.raises(InvalidInput, match=r"layer 1 uses the blocks that a layer in share=\(0, 2\) recalls"):
        drive(step, again, windows={0: 7})


@every_kind
def test_what_it_reads(method: BlockMKA) -> None:
    """Codes of the blocks before the window, keys of a completed block, keys and values that are attended to."""
    layers = layers_of(method)
    layers.read([0, 1, 2], [44, 6, 43])
    ((call, _),) = layers.decode([0, 1, 2])
    width = {"summary": 16, "bounds": 32, "hash": 64}[method.recall]
    assert metadata_of(call) == ([6 * 2 * width * 4, 0, 6 * 2 * width * 4], 0)
    ended, both = passes_of(call, "key_bytes")
    assert ended == [[5, 5], [0, 0], [0, 0]], "the first row completes a block"
    assert both == [[25, 25], [7, 7], [24, 24]] and passes_of(call, "value_bytes") == [both]


@every_kind
@pytest.mark.parametrize("counts", [[1] * 32, [7, 16, 9], [29, 3]])
def test_codes_are_the_same_however_the_prompt_is_read(method: BlockMKA, counts: Sequence[int]) -> None:
    k, found = torch.randn(32, 2, 16), []
    for chunks in ([32], counts):
        layers = layers_of(method)
        for chunk, part in zip(chunks, k.split(list(chunks)), strict=True):
            layers.read([1], [chunk], k=part)
        state = layers.state()
        assert isinstance(state, BlockCodes)
        found.append(state["codes"][1, :, :6])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


@every_kind
@every_cache
def test_cut_and_grown_again(method: BlockMKA, config: CacheConfig) -> None:
    """Cuts in the middle of blocks, at their ends and across several; what follows is other text."""
    layers = layers_of(method, config=config)
    layers.read([0, 1], [41, 30])
    for length in (40, 38, 33, 32, 17, 1):
        layers.decode([1, 0])
        layers.cache.truncate([0], [length])
        layers.read([0], [16])
        for _ in range(5):
            ((call, outcome),) = layers.decode([0, 1])
            check(method, call, outcome)


def test_codes_follow_overwritten_keys() -> None:
    layers = layers_of(FEW)
    (read,) = layers.read([0], [41])
    slots, state, view = torch.tensor([7, 8, 22]), layers.state(), read.kv
    assert isinstance(state, BlockCodes)
    before = state["codes"].clone()
    page, offset = view.locate(torch.zeros(3).long(), slots)
    view.k[page, :, offset] = torch.randn(3, 2, 16)
    state.written(0, view, torch.zeros(3).long(), slots)
    changed = (state["codes"] != before).any(-1)[0, 0, :8]
    assert changed.tolist() == [False, True, False, False, True, False, False, False]
    ((call, outcome),) = layers.decode([0])
    check(FEW, call, outcome)


def test_blocks_that_rows_complete() -> None:
    pos = torch.cat([torch.arange(3, 14), torch.arange(2)])
    seq = torch.tensor([1] * 11 + [0] * 2)
    rows = Rows(torch.randn(13, 2, 8), seq, pos, (RowRange(11, 1, 3), RowRange(0, 2, 9), RowRange(2, 0, 0)))
    found = ends_of(rows, 4)
    assert found is not None and [x.tolist() for x in found] == [[1, 1, 1], [0, 1, 2]]
    for runs in (None, (RowRange(11, 1), RowRange(2, 0)), (RowRange(1, 0, 3),) * 13):
        assert ends_of(replace(rows, runs=runs), 4) is None


@pytest.mark.parametrize("page", [3, 7, 12])
def test_blocks_that_straddle_pages_are_refused_by_name(page: int) -> None:
    layers = layers_of(FEW, config=CacheConfig("paged", page=page))
    with pytest.raises(Unsupported, match=f"blocks of 5 keys neither divide pages of {page} slots"):
        layers.read([0], [40])


@pytest.mark.parametrize(("page", "block"), [(4, 4), (4, 8), (8, 4), (2, 16)])
def test_pages_of_blocks_and_blocks_of_pages(page: int, block: int) -> None:
    method = BlockMKA(block=block, window=block, blocks=1)
    layers = layers_of(method, config=CacheConfig("paged", page=page))
    layers.read([0, 1], [61, 30])
    layers.read([1], [31])
    for _ in range(3):
        ((call, outcome),) = layers.decode([1, 0])
        check(method, call, outcome)


def test_evicted_keys_are_refused_by_name() -> None:
    layers = layers_of(FEW)
    layers.read([0], [40])
    layers.keep(0, 0, 20)
    with pytest.raises(Unsupported, match="block_mka: after eviction slots are not positions"):
        layers.decode([0])


def test_frequencies_are_required() -> None:
    layers = Layers(FEW)
    with pytest.raises(
        InvalidInput, match=r"LayerCall\.frequencies is required: block_mka codes blocks by keys before"
    ):
        layers.read([0], [40])
    bounds = Layers(replace(FEW, recall="bounds"))
    bounds.read([0], [40])
    bounds.decode([0])


def test_a_prompt_that_it_has_not_observed_is_refused() -> None:
    layers = layers_of(FEW)
    layers._pass(Segment("prefill", Dense()), [0], [30], {})
    with pytest.raises(InvalidInput, match="block_mka decodes with state that it makes of the prompt"):
        layers.decode([0])


MODEL = ModelShape(4, 4, 2, 16)


@pytest.mark.parametrize(
    ("method", "shape", "message"),
    [
        (
            replace(FEW, share=(1,)),
            MODEL,
            r"share: expected layer 0 among them, the first that is not dense, got \(1,\)",
        ),
        (replace(FEW, share=(2,), dense_layers=(0,)), MODEL, "share: expected layer 1 among them"),
        (replace(FEW, share=(0, 4)), MODEL, r"share: .* has 4 \(0 to 3\), got layer 4"),
        (replace(FEW, dense_layers=(7,)), MODEL, r"dense_layers: .* got layer 7"),
        (
            replace(FEW, recall="bounds"),
            replace(MODEL, head_dim=256),
            "head dim: codes 'bounds' take up to 128, got 256",
        ),
    ],
)
def test_options_that_do_not_fit_a_model(method: AttentionMethod, shape: ModelShape, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        method.check(shape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": (0, 1), "dense_layers": (1,)}, r"share: expected layers that are not in dense_layers, got \[1\]"),
        ({"block": 48}, "window: expected a multiple of block=48, got 512"),
        ({"bits": 64}, "bits: expected 128, as recall='bounds' has no hashes, got 64"),
        ({"seed": 3, "recall": "bounds"}, "seed: expected 0, as recall='bounds' has no hashes, got 3"),
    ],
)
def test_options_that_do_not_fit_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        BlockMKA(**options)


def test_everything_may_be_dense() -> None:
    replace(FEW, share=(), dense_layers=(0, 1, 2, 3)).check(MODEL)
    assert BlockMKA(dense_layers=(0,)).whole_layers(MODEL, torch.float32) == (0,)
