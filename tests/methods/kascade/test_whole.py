"""The whole method against the same written anew: results and choices, whatever the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longreach.cache import CacheConfig
from longreach.methods.call import LayerCall
from longreach.methods.kascade import Kascade
from longreach.methods.kascade import prefill as reading
from longreach.ops import Lists
from tests.methods.drive import CACHES, KV_HEADS, LAYERS, Pass, new_cache, outputs, read_text, slots_read, text
from tests.methods.kascade.alone import Alone
from tests.methods.kascade.planned import planned
from tests.tiers import swept

LENGTH, STEPS = 37, 5
CROSSED = {1: (1, 0), 2: (1, 1)}


def assert_same(
    method: Kascade, alone: Alone, *, chunks: list[int] | None = None, config: CacheConfig | None = None, seed: int = 0
) -> list[Pass]:
    whole, read = text(LENGTH, seed=seed), chunks or [LENGTH - STEPS]
    passes = read_text(method, whole, chunks=read, steps=STEPS, cache=new_cache(config))
    want = alone.answer(whole, read, STEPS)
    torch.testing.assert_close(outputs(passes).double(), want, rtol=0, atol=1e-5)
    row = 0
    for turn in passes:
        for n in range(turn.calls[0].rows.pos.shape[0]):
            for layer in range(LAYERS):
                if alone.dense(layer):
                    continue
                read_here = slots_read(turn.calls[layer], turn.calls[layer].meter.values)[n]
                for g in range(KV_HEADS):
                    assert read_here[g].nonzero()[:, 0].tolist() == alone.chosen[layer][row][g]
            row += 1
    return passes


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"k": 0.2, "min_keys": 1}),
    ({"anchors": (0,), "head_map": CROSSED}, {"k": 0.25, "min_keys": 3}),
    ({"anchors": (0, 1), "head_map": {2: (1, 1)}}, {"k": 5}),
    ({"anchors": (0, 2)}, {"k": 0.1, "min_keys": 6, "sinks": 2, "recent": 4}),
    ({"anchors": (0,), "head_map": {2: (1, 0)}}, {"k": 4, "sinks": 3, "recent": 1}),
    ({"anchors": (0, 1), "head_map": CROSSED | {1: (0, 1)}}, {"k": 0.2, "min_keys": 2, "heads": "all"}),
    ({"anchors": (0, 1)}, {"k": 0.15, "min_keys": 2, "dense_below": 18}),
    ({"anchors": (0, 1), "head_map": {2: (0, 0)}}, {"k": 3, "dense_layers": (1,)}),
    ({"anchors": (0,)}, {"k": 3, "dense_layers": (2,)}),
    ({"tile": 7}, {"k": 0.3, "min_keys": 1}),  # 3 tokens: a group of 2 does not divide it
    ({"tile": 1}, {"k": 0.3, "min_keys": 1}),  # smaller than a group: 1 token
    ({"tile": 128}, {"k": 0.3, "min_keys": 1}),
]


@pytest.mark.covering
@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_it_is_what_the_paper_says(
    case: tuple[dict[str, Any], dict[str, Any]], config: CacheConfig, tmp_path: Path
) -> None:
    plan, options = case
    heads = {"all_heads": options.get("heads") == "all"}
    same = {"anchors": (0, 1), "tile": 8, **plan}
    maps = {"maps": same.pop("head_map", {})}
    alone = Alone(**same, **maps, **heads, **{k: v for k, v in options.items() if k != "heads"})
    method = Kascade(planned(tmp_path, **plan), **options)
    assert_same(method, alone, config=config)


@pytest.mark.parametrize("chunks", swept([[1, 5, 2, 10, 14], [3, 29], [8, 8, 16], [4, 28], [1] * 32], 3), ids=str)
def test_chunks_that_share_a_tile_choose_each_for_themselves(chunks: list[int], tmp_path: Path) -> None:
    method = Kascade(planned(tmp_path, anchors=(0,), head_map=CROSSED), k=0.2, min_keys=2)
    alone = Alone((0,), CROSSED, k=0.2, min_keys=2)
    assert_same(method, alone, chunks=chunks, config=CacheConfig("paged", page=3))


@pytest.mark.parametrize("chunks", [[4, 28], [12, 20], [4] * 8])
def test_chunks_that_end_where_tiles_do_change_nothing(chunks: list[int], tmp_path: Path) -> None:
    method, whole = Kascade(planned(tmp_path, head_map={2: (1, 0)}), k=0.2, min_keys=2, sinks=1), text(LENGTH, seed=4)
    want = read_text(method, whole, steps=STEPS)
    found = read_text(method, whole, chunks=chunks, steps=STEPS)
    torch.testing.assert_close(outputs(found), outputs(want), rtol=0, atol=2e-5)
    for layer in (1, 2):
        parts = [slots_read(t.calls[layer], t.calls[layer].meter.values) for t in found[: len(chunks)]]
        at_once = slots_read(want[0].calls[layer], want[0].calls[layer].meter.values)
        end = 0
        for part in parts:
            rows, _, stop = part.shape
            assert torch.equal(part, at_once[end : end + rows, :, :stop])
            end += rows


@pytest.mark.parametrize("scratch", [1, 20_000, 1 << 20])
def test_what_is_scored_at_a_time_is_bounded_and_changes_nothing(
    scratch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From tiles one by one to all of them. The scores of a tile take 128 columns of fp32 for each KV head."""
    plain, scored = LayerCall.op, list[int]()

    def watched(call: LayerCall, name: str, *given: Any, **more: Any) -> Any:
        result = plain(call, name, *given, **more)
        if name == "tile_scores":
            scored.append(result.numel() * 4)
        assert name != "score_keys" or call.phase == "decode"
        return result

    monkeypatch.setattr(reading, "SCRATCH", scratch)
    monkeypatch.setattr(LayerCall, "op", watched)
    method = Kascade(planned(tmp_path, (0, 2), {1: (1, 0)}), k=0.2, min_keys=2)
    assert_same(method, Alone((0, 2), {1: (1, 0)}, k=0.2, min_keys=2), config=CacheConfig(capacity=40))
    tile = 4 * 128 * KV_HEADS
    assert max(scored) <= max(scratch, tile) and sum(scored) == 2 * tile * 7  # the first tile: none
    assert len(scored) == {1: 14, 20_000: 4, 1 << 20: 2}[scratch]


def test_lists_are_index_sorted_and_not_copied_for_reuse(tmp_path: Path) -> None:
    method = Kascade(planned(tmp_path, anchors=(0,), head_map=CROSSED), k=0.3, min_keys=2)
    last = read_text(method, text(LENGTH))[-1]
    lists = [call.meter.values[-1] for call in last.calls[1:]]
    for made in lists:
        assert isinstance(made, Lists) and made.index.dtype == torch.int32
        assert made.index.data_ptr() == lists[0].index.data_ptr()
        for head in range(KV_HEADS):
            used = made.index[0, head, : int(made.count[0, head])].tolist()
            assert used == sorted(set(used)) and used[-1] == LENGTH - 1
